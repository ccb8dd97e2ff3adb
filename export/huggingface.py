"""Checkpoints as Hugging Face folders: config.json, safetensors in one file or in shards, tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.export.checkpoint import D2T, Quantized, TokenizerFiles
from outrider.export.grouped import FLOATS
from outrider.export.packed import packed_matrices

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Causal masks that old files hold, whatever their type.
_BUFFERS = tuple(f".{module}.{name}" for module in ("attention", "attn") for name in ("bias", "masked_bias"))
# Of the families that store these ``[inputs, outputs]``, and are read as all others.
_TRANSPOSED = {"gpt2": tuple(f".{name}.weight" for name in ("c_attn", "c_fc", "c_proj"))}
_FP8 = "F8_E4M3"
_TEMPLATE_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class HuggingFaceCheckpoint:
    """See ``checkpoint.Checkpoint``. Files are opened for each read and closed again: nothing stays mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.json").is_file():
            raise OutriderError(f"{path} has no config.json; pass the folder of a Hugging Face checkpoint")
        self.config: dict[str, Any] = _read_json(path / "config.json")
        self._file_of = self._index()
        self._shapes: dict[str, tuple[int, ...]] = {}
        dtypes = self._read_headers()
        self._packed = packed_matrices(self.config, path, self._shapes, self._tensor)
        self._check_dtypes(dtypes)

    def shape(self, name: str) -> tuple[int, ...] | None:
        stored = self._stored_name(name)
        if stored in self._packed:
            return self._packed[stored].shape
        shape = self._shapes.get(stored)
        return shape[::-1] if shape and self._transposed(name) else shape

    def unread(self, names: set[str]) -> list[str]:
        parts = {part for matrix in self._packed.values() for part in matrix.parts}
        present = self._shapes.keys() - parts | self._packed.keys()
        return sorted(present - {self._stored_name(name) for name in names})

    def read(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        stored, rows = self._stored_name(name), slice(start, stop)
        if stored in self._packed:
            return self._packed[stored].read(start, stop)
        # Of columns, too, only what is asked for comes into memory.
        part = self._tensor(stored, slice(None), rows).T if self._transposed(name) else self._tensor(stored, rows)
        return np.ascontiguousarray(part, dtype=np.float32)

    def quantized(self, name: str) -> Quantized | None:
        return self._packed.get(self._stored_name(name))

    def _stored_name(self, name: str) -> str:
        """Files that were saved without the language model's head lack the first part of their tensors' names."""
        return name if name in self._shapes or name in self._packed else name.partition(".")[2]

    def _transposed(self, name: str) -> bool:
        return name.endswith(_TRANSPOSED.get(str(self.config.get("model_type")), ()))

    def tokenizer(self) -> TokenizerFiles:
        path = self.path / "tokenizer.json"
        if not path.is_file():
            raise OutriderError(
                f"{self.path} has no tokenizer.json; save the tokenizer with a fast tokenizer of transformers first"
            )
        settings = _read_json_if_there(self.path / "tokenizer_config.json")
        return TokenizerFiles(
            json=_read_text(path),
            chat_template=self._chat_template(settings),
            special_tokens={name: self._token(settings, name) for name in _TEMPLATE_NAMES if settings.get(name)},
            eos_token_ids=self._eos_token_ids(),
        )

    def _token(self, settings: dict[str, Any], name: str) -> str:
        token = settings[name]
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str):
            raise OutriderError(f"{self.path / 'tokenizer_config.json'}: {name} is {token!r}, not a token's text")
        return text

    def _eos_token_ids(self) -> tuple[int, ...]:
        eos = _read_json_if_there(self.path / "generation_config.json").get("eos_token_id")
        eos = self.config.get("eos_token_id") if eos is None else eos
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(isinstance(token, int) for token in ids):
            raise OutriderError(f"{self.path}: eos_token_id is {eos!r}, not a token id or a list of them")
        return tuple(ids)

    def _chat_template(self, settings: dict[str, Any]) -> str | None:
        path = self.path / "chat_template.jinja"
        if path.is_file():
            return _read_text(path)
        template = settings.get("chat_template")
        if isinstance(template, list):  # several named templates: the default one is the chat's
            named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
            template = named[0].get("template") if named else None
        if template is not None and not isinstance(template, str):
            raise OutriderError(f"{self.path / 'tokenizer_config.json'}: chat_template is {template!r}, not a text")
        return template

    def _index(self) -> dict[str, Path]:
        if (self.path / _INDEX).is_file():
            weight_map = _read_json(self.path / _INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise OutriderError(f"{self.path / _INDEX} has no weight_map from tensors to files; download it again")
            files = {name: self.path / file for name, file in weight_map.items()}
        elif (self.path / _SINGLE).is_file():
            with _open(self.path / _SINGLE) as file:
                files = dict.fromkeys(file.keys(), self.path / _SINGLE)
        else:
            raise OutriderError(f"{self.path} has neither {_SINGLE} nor {_INDEX}; pickled weights are never read")
        for path in sorted(set(files.values())):
            if not path.is_file():
                raise OutriderError(f"{path} is missing, and {_INDEX} names it; download the shard again")
        return files

    def _tensor(self, name: str, *index: slice) -> NDArray[Any]:
        """A tensor or a part of it as its file has it."""
        with _open(self._file_of[name]) as file:
            if file.get_slice(name).get_dtype() == _FP8:
                return _fp8_rows(self._file_of[name], name, *index)
            return np.asarray(file.get_slice(name)[index] if index else file.get_tensor(name))

    def _read_headers(self) -> dict[str, str]:
        """The dtypes; shapes go to their place."""
        dtypes = {}
        for path in sorted(set(self._file_of.values())):
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118
                    if name.endswith(_BUFFERS):
                        continue
                    if name in self._shapes:
                        raise OutriderError(
                            f"{path} has a tensor {name}, and so has another file; one of the files is not of this "
                            "checkpoint: remove it, or download all again"
                        )
                    entry = file.get_slice(name)
                    self._shapes[name] = tuple(entry.get_shape())
                    dtypes[name] = entry.get_dtype()
        for name, path in self._file_of.items():
            if name not in self._shapes and not name.endswith(_BUFFERS):
                raise OutriderError(f"{path} has no tensor {name}, and {_INDEX} names it; download the shard again")
        return dtypes

    def _check_dtypes(self, dtypes: dict[str, str]) -> None:
        packed = {part: kinds for matrix in self._packed.values() for part, kinds in matrix.parts.items()}
        for name, dtype in dtypes.items():
            fitting = ("I64", "I32") if name == D2T else packed.get(name, FLOATS)
            if dtype not in fitting:
                raise OutriderError(
                    f"{self._file_of[name]}: tensor {name} has type {dtype}; types that can be read: "
                    f"{', '.join(fitting)}"
                )


def _fp8_rows(path: Path, name: str, rows: slice) -> NDArray[Any]:
    """Rows of a matrix in float8_e4m3fn, of which numpy, and so safetensors, knows nothing."""
    import ml_dtypes

    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size))[name]
    shape, offset = entry["shape"], 8 + size + entry["data_offsets"][0]
    content = np.memmap(path, np.uint8, "r", offset, tuple(shape))
    return np.array(content[rows]).view(ml_dtypes.float8_e4m3fn)


def _open(path: Path) -> Any:
    import ml_dtypes  # noqa: F401  teaches numpy the name bfloat16
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise OutriderError(f"{path} is damaged or cut short ({error}); download it again") from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (ValueError, OSError) as error:
        raise OutriderError(f"{path} cannot be read ({error})") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise OutriderError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise OutriderError(f"{path} holds no JSON object")
    return content


def _read_json_if_there(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}
