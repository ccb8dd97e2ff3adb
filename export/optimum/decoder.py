"""A model without a file in ``export/architectures``: traced by Optimum, rewritten, and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import onnx
from numpy.typing import NDArray

from outrider.engines.bundle import ModelInfo
from outrider.engines.errors import OutriderError
from outrider.export.checkpoint import Checkpoint
from outrider.export.huggingface import HuggingFaceCheckpoint
from outrider.export.model import STORED_TOKENS, ModelExport, Progress, cache_capacity
from outrider.export.optimum.process import export_onnx
from outrider.export.precision import BITS
from outrider.export.weights import Weights

if TYPE_CHECKING:
    import onnx_ir as ir

PRECISIONS = ("fp32", "fp16", "int8", "int4")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_UNLIMITED = 1 << 30
# Of transformers 5, and what older ones take when they do not find their own keys.
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class TracedDecoder:
    """What the exporter must know of a traced model; the fields are named as those of ``DecoderSpec``.

    ``path`` is the graph that Optimum wrote.
    """

    path: Path
    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int


@dataclass(frozen=True)
class TracedExport(ModelExport):
    """A traced model as it is to be written. Of a spec it needs no more than ``TracedDecoder`` has."""

    spec: TracedDecoder  # type: ignore[assignment]

    def check(self, work: Path, info: ModelInfo, ids: list[int], threads: int | None, progress: Progress) -> ModelInfo:
        """All of it, whatever its size: ONNX Runtime maps the weights of both graphs."""
        return self._check(work, info, ids, threads, progress)

    @cached_property
    def _rewritten(self) -> ir.Model:
        # onnx_ir takes as long to import as all else together, so only what needs it does.
        from outrider.export.optimum.narrow import narrow
        from outrider.export.optimum.rewrite import rewrite
        from outrider.export.optimum.trace import Trace

        spec, capacity = self.spec, cache_capacity(self.max_length)
        with _about(self.checkpoint.path):
            model, geometry = rewrite(
                Trace(spec.path), capacity=capacity, positions=spec.max_positions, vocab_size=spec.vocab_size
            )
            if self.precision == "fp16":
                narrow(model, geometry)
            return model

    def _decoder(self, weights: Weights, progress: Progress = lambda part: None) -> onnx.ModelProto:
        from outrider.export.optimum.emit import emit

        with _about(self.checkpoint.path):
            return emit(self._rewritten, self.spec.architecture, weights, self.precision, progress)

    @property
    def _packs(self) -> bool:
        return False  # its attention is as it was traced

    @property
    def _routed(self) -> bool:
        return False

    def _provenance(self) -> dict[str, dict[str, int]]:
        return {}  # Optimum reads no quantized checkpoints

    def _references(self, ids: list[int], threads: int | None) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """By the graph as Optimum wrote it, and by the same over the weights as stored."""
        from outrider.export.optimum.matrix import matrices_of
        from outrider.export.optimum.stored import write_stored
        from outrider.export.optimum.trace import Trace

        with _about(self.checkpoint.path):
            trace = Trace(self.spec.path)
            expected = trace.logits(ids, threads)[:, : self.spec.vocab_size]
            if self.precision not in BITS:
                return expected, expected
            rounded = write_stored(trace, matrices_of(trace.model()), BITS[self.precision])
            return expected, trace.logits(ids[:STORED_TOKENS], threads, rounded)[:, : self.spec.vocab_size]


def check_traced_options(via: str, precisions: Sequence[str | None], others: Mapping[str, object]) -> None:
    """Raises OutriderError for options that a traced graph does not take.

    Args:
        others: options that choose a lowering, or the precision of some matrices, with their values.
    """
    if via != "optimum":
        raise OutriderError(f"unknown exporter {via!r} for --via; the only one is optimum")
    for precision in precisions:
        if precision is not None and precision not in PRECISIONS:
            *most, last = PRECISIONS
            raise OutriderError(f"--via optimum has no {precision}; use {', '.join(most)} or {last}")
    for option in (option for option, value in others.items() if value):
        raise OutriderError(
            f"{option} does not go with --via optimum, where one precision is that of all matrices and settles the rest"
        )


def traced_lowering(precision: str) -> str:
    """Matrices in blocks are in ONNX Runtime's own operators; all else is in ONNX's."""
    return "fused" if precision in BITS else "standard"


@contextmanager
def traces_beside(out: Path) -> Iterator[Path]:
    """A folder for traced graphs, on the disk that the bundle is to be on, and gone at the end."""
    out = out.absolute()
    try:
        folder = TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent)
    except OSError as error:
        raise OutriderError(f"could not write {out}: {error.strerror or error}") from error
    with folder as name:
        yield Path(name)


def traced_decoder(checkpoint: Checkpoint, folder: Path) -> TracedDecoder:
    """Have Optimum trace a checkpoint into ``folder``, which is made here.

    Raises:
        OutriderError: it is no Hugging Face folder, or see ``process`` and ``trace``.
    """
    from outrider.export.optimum.trace import Trace

    if not isinstance(checkpoint, HuggingFaceCheckpoint):
        raise OutriderError(f"{checkpoint.path}: --via optimum takes a Hugging Face folder or a hub id")
    config = checkpoint.config
    if config.get("quantization_config"):
        raise OutriderError(f"{checkpoint.path}: --via optimum takes no quantized checkpoint (quantization_config)")
    if config.get("rope_parameters") not in (None, _DEFAULT_ROPE):
        raise OutriderError(
            f"{checkpoint.path}: its config.json has rope_parameters, which the transformers that Optimum needs does "
            "not read; save the checkpoint with a transformers before 5"
        )
    path = export_onnx(checkpoint.path, folder)
    with _about(checkpoint.path):
        trace = Trace(path)
    limits = [config[key] for key in _POSITIONS if isinstance(config.get(key), int)]
    return TracedDecoder(
        path=path,
        architecture=str(config.get("model_type")),
        num_layers=trace.num_layers,
        num_kv_heads=trace.num_kv_heads,
        head_dim=trace.head_dim,
        vocab_size=trace.vocab_size,
        max_positions=limits[0] if limits else _UNLIMITED,
    )


@contextmanager
def _about(source: Path) -> Iterator[None]:
    """Errors name the checkpoint."""
    try:
        yield
    except OutriderError as error:
        raise OutriderError(f"{source}: {error}") from None
