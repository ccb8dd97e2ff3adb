"""Checkpoints as GGUF files, seen through Hugging Face names and conventions.

The format is read and dequantized by the ``gguf`` package. What is done here: metadata become config keys, tensor names
are translated, and the row order that llama.cpp gives rotary projections is undone.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.export.checkpoint import Quantized, QuantizedType, TokenizerFiles
from outrider.export.gguf_blocks import TYPES, GGUFMatrix, read_integers
from outrider.export.gguf_config import ROPE_TENSORS, config_from_metadata
from outrider.export.gguf_tokenizer import tokenizer_from_metadata
from outrider.export.quantize import Integers

_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_FLOATS = ("F32", "F16", "BF16")
_ROTARY_ORDER = ("llama", "granite", "smollm3")  # whose queries and keys llama.cpp rotates pair by pair


class GGUFCheckpoint:
    """See ``checkpoint.Checkpoint``."""

    def __init__(self, path: Path) -> None:
        import gguf

        self.path = path
        with _damage_named(path):
            self._reader = _reader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        for tensor in self._tensors.values():
            if tensor.tensor_type.name not in _TYPES:
                raise OutriderError(
                    f"{path}: tensor {tensor.name} has type {tensor.tensor_type.name}; "
                    f"types that can be read: {', '.join(_TYPES)}"
                )
        with _damage_named(path):
            shapes = {name: _shape(tensor) for name, tensor in self._tensors.items()}
            self.config = config_from_metadata(self.metadata, shapes, self._vector, path)
            self._names = gguf.get_tensor_name_map(self._architecture(), self.config["num_hidden_layers"])

    def metadata(self, key: str) -> Any:
        """A metadata value as Python data, or None."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def shape(self, name: str) -> tuple[int, ...] | None:
        tensor = self._tensors.get(self._gguf_name(name))
        return None if tensor is None else _shape(tensor)

    def unread(self, names: set[str]) -> list[str]:
        return sorted(self._tensors.keys() - {self._gguf_name(name) for name in names} - ROPE_TENSORS)

    def read(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        tensor = self._tensors[self._gguf_name(name)]
        first, last, order = self._file_rows(name, start, stop)
        rows = self._dequantize(tensor, first, last)
        return rows if order is None else np.ascontiguousarray(rows[order])

    def quantized(self, name: str) -> Quantized | None:
        tensor = self._tensors.get(self._gguf_name(name))
        if tensor is None or len(tensor.shape) < 2 or tensor.tensor_type.name in _FLOATS:
            return None
        kind = tensor.tensor_type.name

        def integers(start: int, stop: int) -> Integers:
            first, last, order = self._file_rows(name, start, stop)
            rows = read_integers(tensor.data[first:last], kind)
            self._forget_pages()
            return rows if order is None else rows.rows(order)

        return GGUFMatrix(TYPES.get(kind, QuantizedType(kind)), integers)

    def tokenizer(self) -> TokenizerFiles:
        with _damage_named(self.path):
            return tokenizer_from_metadata(self.metadata, self.path)

    def _dequantize(self, tensor: Any, start: int, stop: int) -> NDArray[np.float32]:
        import gguf

        if len(tensor.shape) == 1:  # one row, whatever the bytes of its type
            return gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)[start:stop]
        rows = gguf.dequantize(tensor.data[start:stop], tensor.tensor_type).astype(np.float32, copy=True)
        self._forget_pages()
        return rows

    def _forget_pages(self) -> None:
        """The reader maps the whole file; pages already read need not stay in memory."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._reader.pages.madvise(mmap.MADV_DONTNEED)

    def _vector(self, name: str) -> NDArray[np.float32]:
        return self._dequantize(self._tensors[name], 0, int(self._tensors[name].shape[0]))

    def _gguf_name(self, name: str) -> str:
        translated = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        return str(translated or name)

    def _file_rows(self, name: str, start: int, stop: int) -> tuple[int, int, NDArray[np.int64] | None]:
        """Rows of the file's tensor around the wanted ones, and where in them these are; None for all in order."""
        heads = self._rotary_heads(name)
        if heads is None:
            return start, stop, None
        size = int(self._tensors[self._gguf_name(name)].shape[-1]) // heads  # whole heads around the wanted rows
        first, last = start // size * size, -(-stop // size) * size
        order = _undo_rotary_order(np.arange(last - first), (last - first) // size)
        return first, last, order[start - first : stop - first]

    def _rotary_heads(self, name: str) -> int | None:
        """The number of heads whose rows llama.cpp interleaves in this tensor, or None."""
        if self.config["model_type"] not in _ROTARY_ORDER:
            return None
        if ".q_proj." in name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".k_proj." in name else None

    def _architecture(self) -> Any:
        import gguf

        by_name = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
        return by_name.get(self.metadata("general.architecture"), gguf.MODEL_ARCH.LLAMA)


def _reader(path: Path) -> Any:
    """That of ``gguf`` over a plain view of the file: slices of ``np.memmap``, one a token, take thrice as long."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        @property  # type: ignore[override]
        def data(self) -> NDArray[np.uint8]:
            return self._view

        @data.setter
        def data(self, mapped: Any) -> None:
            self.pages: mmap.mmap = mapped.base
            self._view: NDArray[np.uint8] = mapped.view(np.ndarray)

    return Reader(path)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """The reader checks little: in a damaged file it trips over lengths, types and bytes that make no sense."""
    try:
        yield
    except (ValueError, LookupError, TypeError, ArithmeticError, OSError) as error:
        raise OutriderError(f"{path} is damaged or cut short ({error}); download it again") from error


def _shape(tensor: Any) -> tuple[int, ...]:
    """As numpy has it: the file's order of axes is the other way round."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _undo_rotary_order(rows: NDArray[np.int64], heads: int) -> NDArray[np.int64]:
    """From llama.cpp's order (pairs side by side) to Hugging Face's (halves apart), head by head."""
    return rows.reshape(heads, len(rows) // heads // 2, 2).swapaxes(1, 2).reshape(-1)
