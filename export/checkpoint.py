"""A checkpoint, whatever its file format: config, tensors read on demand, tokenizer. Export sees only this."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.export.quantize import SYMMETRIC, BlockLayout, Integers

D2T = "d2t"  # of a reduced head
_SLAB_BYTES = 32 << 20
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "model*.safetensors", "*.jinja", "tokenizer.model"]


@dataclass(frozen=True)
class TokenizerFiles:
    """``json`` is the text of a ``tokenizer.json``; ``special_tokens`` are the names that chat templates use."""

    json: str
    chat_template: str | None
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class QuantizedType:
    """How a file holds a matrix that is quantized.

    ``name`` is the format's own ("Q4_K", "gptq 4-bit"). ``bits`` are those of its integers, 0 where they are not in
    blocks along the inputs or not integers; ``layout`` is what blocks of them need.
    """

    name: str
    bits: int = 0
    layout: BlockLayout = SYMMETRIC


class Quantized(Protocol):
    """A matrix of a checkpoint as its file holds it."""

    @property
    def type(self) -> QuantizedType: ...

    @property
    def input_order(self) -> NDArray[np.int64] | None:
        """Which input each column of the integers is for, where their blocks are not of neighbours (``[inputs]``)."""
        ...

    def integers(self, start: int, stop: int) -> Integers:
        """Rows ``start`` to ``stop``; only where the type has bits."""
        ...


class Checkpoint(Protocol):
    """``config`` has the keys of a Hugging Face ``config.json``; tensors go by their Hugging Face names."""

    path: Path
    config: dict[str, Any]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The tensor's shape, or None when the checkpoint has no such tensor."""
        ...

    def unread(self, names: set[str]) -> list[str]:
        """Tensors that are in the files and not among ``names``."""
        ...

    def read(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows ``start`` to ``stop`` of the first axis, as float32 (exact for fp16 and bf16, dequantized for GGUF)."""
        ...

    def quantized(self, name: str) -> Quantized | None:
        """The matrix as the file holds it, or None where that is not quantized."""
        ...

    def tokenizer(self) -> TokenizerFiles: ...


def read_rows(checkpoint: Checkpoint, name: str, rows: int, *, beside: int = 1) -> Iterator[NDArray[np.float32]]:
    """The first ``rows`` rows of a tensor in slabs of bounded size, so that memory does not grow with the tensor.

    Args:
        beside: how many tensors like this one are read at a time, within the same bound.
    """
    for start, stop in slab_bounds(checkpoint, name, rows, beside):
        yield finite(checkpoint, name, checkpoint.read(name, start, stop))


def slab_bounds(checkpoint: Checkpoint, name: str, rows: int, beside: int = 1) -> Iterator[tuple[int, int]]:
    """First row of each slab, and the row behind its last."""
    shape = checkpoint.shape(name)
    assert shape is not None, name
    return bounds(rows, 4 * beside * int(np.prod(shape[1:], dtype=np.int64)))


def bounds(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Rows in slabs of bounded size: the first row of each, and the row behind its last."""
    step = max(1, _SLAB_BYTES // max(1, row_bytes))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def read_all(checkpoint: Checkpoint, name: str) -> NDArray[np.float32]:
    shape = checkpoint.shape(name)
    assert shape is not None, name
    return finite(checkpoint, name, checkpoint.read(name, 0, shape[0]))


def finite(checkpoint: Checkpoint, name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """``values``. Raises OutriderError where some are NaN or Inf."""
    if not (np.isfinite(values.min(initial=0)) and np.isfinite(values.max(initial=0))):
        raise OutriderError(
            f"{checkpoint.path}: tensor {name} holds values that are not finite (NaN or Inf); its training went wrong, "
            "or its download"
        )
    return values


def open_checkpoint(source: str) -> Checkpoint:
    """Open a Hugging Face folder, a GGUF file, or a hub id (downloaded by ``huggingface_hub``).

    Raises:
        OutriderError: nothing there, or not a checkpoint, or damaged.
    """
    from outrider.export.gguf_checkpoint import GGUFCheckpoint
    from outrider.export.huggingface import HuggingFaceCheckpoint

    path = Path(source)
    if path.is_dir():
        return HuggingFaceCheckpoint(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return GGUFCheckpoint(path)
        raise OutriderError(f"{path} is not a checkpoint: pass a Hugging Face folder or a .gguf file")
    if path.suffix != ".gguf" and _HUB_ID.fullmatch(source):
        return HuggingFaceCheckpoint(_download(source))
    raise OutriderError(f"{path} does not exist; pass a Hugging Face folder, a .gguf file or a hub id")


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub client raises its own, the HTTP client's and the system's errors
        raise OutriderError(f"{hub_id} is no file or folder here, and the hub did not give it: {error}") from None
