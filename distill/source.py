"""The target as distillation needs it: an engine of many lanes, what opens a text, its embedding and vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from outrider.distill.starts import Opening, opening_of
from outrider.engines.bundle import Bundle
from outrider.engines.ort import OrtEngine
from outrider.export import ExportOptions, export_bundle
from outrider.export.architectures import decoder_spec
from outrider.export.checkpoint import Checkpoint, open_checkpoint, read_all
from outrider.export.pair import vocabulary
from outrider.export.spec import DecoderSpec
from outrider.runtime.text import TextCodec

_LANES = 96  # sequences at a time, where their caches fit
_CACHE_BYTES = 4 << 30


@dataclass(frozen=True)
class Source:
    """``folder`` is where its bundle is or will be, ``max_length`` that of a sequence in tokens, opening included."""

    name: str
    folder: Path
    max_length: int
    threads: int

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.name)

    @cached_property
    def spec(self) -> DecoderSpec:
        return decoder_spec(self.checkpoint)

    @cached_property
    def vocab(self) -> dict[str, int]:
        return vocabulary(self.checkpoint.tokenizer(), self.name)

    @cached_property
    def bundle(self) -> Bundle:
        """In int8, whose choices are near the checkpoint's and whose passes of many rows are the fastest."""
        if not self.folder.exists():
            options = ExportOptions("int8", max_length=self.max_length)
            export_bundle(self.name, None, self.folder, options, threads=self.threads, resume=True)
        return Bundle(self.folder)

    @cached_property
    def codec(self) -> TextCodec:
        return TextCodec(self.bundle)

    @cached_property
    def opening(self) -> Opening:
        return opening_of(self.codec, self.bundle.manifest.eos_token_ids)

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for _, shape in self.spec.expected_shapes())

    @property
    def end_token_ids(self) -> frozenset[int]:
        return frozenset(self.bundle.manifest.eos_token_ids)

    def embedding(self) -> Tensor:
        """float32 [V, width], of the tokens that the tokenizer has."""
        rows = read_all(self.checkpoint, f"{self.spec.embedding}.weight")
        return torch.from_numpy(rows[: self.bundle.manifest.target.vocab_size])

    def engine(self) -> OrtEngine:
        """With as many lanes as their caches allow."""
        info = self.bundle.manifest.target
        lane = 2 * info.num_layers * info.num_kv_heads * info.capacity * info.head_dim * 4
        lanes = max(1, min(_LANES, _CACHE_BYTES // lane))
        return OrtEngine(self.bundle.path(info.graph), info, threads=self.threads, batch=lanes)
