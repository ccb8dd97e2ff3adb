"""One model of a bundle: what it will take, its files, and the check that what was written is what was read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np
import onnx
from numpy.typing import NDArray

from outrider.engines.bundle import TOKENIZER, ModelInfo
from outrider.engines.engine import PREFILL_CHUNK, noise_slots
from outrider.engines.ort import OrtEngine
from outrider.engines.packed import PackedEngine
from outrider.engines.probe import Reference, packed_reference, probe_packed, probe_rows
from outrider.export.check import check_engine
from outrider.export.checkpoint import Checkpoint
from outrider.export.decoder import build_decoder, can_pack
from outrider.export.graph import save_model
from outrider.export.heads import with_heads
from outrider.export.precision import Formats, float_type, tensor_precisions
from outrider.export.reference import reference_logits
from outrider.export.spec import DecoderSpec
from outrider.export.stored import as_stored
from outrider.export.takeover import provenance
from outrider.export.weights import CountedWeights, SharedWeights, WeightFile, Weights
from outrider.export.widen import widened_engine

Progress = Callable[[str], None]
_CHECKED_SHARE = 0.3  # of the memory: engines may pack a second copy of their weights
_CHECK_TOKENS = 256  # enough for a perplexity, few enough to cost less than rounding the weights
_PROBED_SEQUENCES = 3
STORED_TOKENS = 32  # for "is it that model?"


@dataclass(frozen=True)
class ModelExport:
    """A checkpoint's model as it is to be written.

    ``graph`` is the path of its plain graph in the bundle, ``max_length`` the longest sequence that it serves in
    tokens, ``tiers`` the values of K, ``tensor_precision`` the precisions of matrices that have one of their own, by
    pattern (``precision.tensor_precisions``), ``tokenizer`` the file of its vocabulary in the bundle. With ``whole`` it
    is a part of the model of that graph, written before it in the same folder, and has its weights.
    """

    graph: str
    spec: DecoderSpec
    checkpoint: Checkpoint
    lowering: str
    precision: str
    head_precision: str
    tiers: tuple[int, ...]
    max_length: int
    whole: str | None = None
    tokenizer: str = TOKENIZER
    tensor_precision: dict[str, str] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """How often ``write`` and ``check`` report progress."""
        return self.spec.num_layers + 4

    def planned_bytes(self) -> int:
        """The size of the weights file. Raises what ``write`` would raise for sizes and formats that do not go."""
        weights = CountedWeights()
        self._decoder(weights)
        return weights.end

    def write(self, work: Path, progress: Progress) -> ModelInfo:
        """Write graphs and weights."""
        info = self._info()
        if self.whole is not None:
            weights = SharedWeights(onnx.load(work / self.whole, load_external_data=False))
            model = self._decoder(weights, progress)
        else:
            (work / self.graph).parent.mkdir(exist_ok=True)
            with WeightFile(work / info.weights) as file:

                def written(part: str) -> None:
                    file.mark()
                    progress(part)

                model = self._decoder(file, written)
        save_model(model, work / info.graph)
        self._write_packed(model, work / info.packed_graph)
        save_model(with_heads(model, noise_slots(self.tiers)), work / info.resident_graph)
        return info

    def _write_packed(self, plain: onnx.ModelProto, path: Path) -> None:
        """The graph for many sequences at once, where there is one, over the same weights."""
        if self._packs:
            weights, capacity = SharedWeights(plain), cache_capacity(self.max_length)
            model = build_decoder(self.spec, self.checkpoint, weights, self._formats, capacity=capacity, packed=True)
            save_model(model, path)

    def check(self, work: Path, info: ModelInfo, ids: list[int], threads: int | None, progress: Progress) -> ModelInfo:
        """Compare the engine with the checkpoint over the start of a text, and probe its rows.

        Of a model too large for this machine's memory only some layers are checked, one of each kind, over the very
        weights that were written; ``check["layers"]`` says how many were.

        Raises:
            OutriderError: another model, or rows that depend on each other.
        """
        size = (work / info.weights).stat().st_size
        if size <= _CHECKED_SHARE * memory_bytes() or self.spec.num_layers < 3:
            return self._check(work, info, ids, threads, progress)
        spec = self.spec.of_layers(self._one_of_each_kind())
        graph = PurePosixPath(self.graph).with_name("part.onnx").as_posix()
        part = replace(self, graph=graph, spec=spec, whole=self.graph)
        part_info = part.write(work, lambda _: None)
        try:
            checked = part._check(work, part_info, ids, threads, progress)
        finally:
            for name in (part_info.graph, part_info.resident_graph, part_info.packed_graph):
                (work / name).unlink(missing_ok=True)
        return replace(
            info,
            check=checked.check,
            exactness=checked.exactness,
            min_rows=checked.min_rows,
            packed_exactness=checked.packed_exactness,
            device=checked.device,
        )

    def _one_of_each_kind(self) -> tuple[int, ...]:
        """The first layer, the last, and the first of every kind: window, positions, experts, precisions."""
        spec, tensors = self.spec, self._formats.tensors
        kinds: dict[object, int] = {}
        for layer in range(spec.num_layers):
            routed = spec.routed(layer)
            stems = [spec.stem(role, layer) for role in spec.layer_names if not role.startswith("expert")]
            formats = tuple(tensors.get(stem) for stem in stems)
            kinds.setdefault((spec.window(layer), spec.rotation(layer), routed, formats), layer)
        return tuple(sorted({0, spec.num_layers - 1, *kinds.values()}))

    def _check(self, work: Path, info: ModelInfo, ids: list[int], threads: int | None, progress: Progress) -> ModelInfo:
        ids = ids[: min(_CHECK_TOKENS, self.max_length)]
        # Before the engine is loaded, so that only one of the two needs memory.
        expected, stored = self._references(ids, threads)
        runs_here = info.cache_dtype != "bfloat16"
        open_engine = OrtEngine if runs_here else widened_engine
        engine = open_engine(work / info.graph, info, threads=threads)
        precisions, source = self._formats.precisions, self.checkpoint.path
        check = check_engine(engine, ids, expected, stored, precisions, source, routed=self._routed)
        info = replace(info, check=check | {"layers": float(self.spec.num_layers)})
        progress("compared with the checkpoint")
        if not runs_here:
            progress("no row probe")
            return replace(info, exactness="unprobed")
        probe = probe_rows(engine, self.tiers)
        info = replace(info, exactness=probe.exactness, min_rows=probe.min_rows, device=engine.device)
        if (work / info.packed_graph).is_file():
            reference = packed_reference(engine, info.min_rows)
            del engine  # for the memory of the next
            info = replace(info, packed_exactness=self._probe_packed(work, info, threads, reference))
        progress("row probe")
        return info

    def _probe_packed(self, work: Path, info: ModelInfo, threads: int | None, reference: Reference) -> str:
        rows = _PROBED_SEQUENCES * (max(self.tiers) + 1) + PREFILL_CHUNK // 4
        packed = PackedEngine(
            work / info.packed_graph,
            info,
            sequences=_PROBED_SEQUENCES,
            min_rows=info.min_rows,
            most_rows=max(rows, info.min_rows),
            threads=threads,
        )
        return probe_packed(packed, reference)

    def _references(self, ids: list[int], threads: int | None) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Logits over a text of the checkpoint, and over the beginning of it of the checkpoint as stored."""
        expected = reference_logits(self.spec, self.checkpoint, np.array(ids))
        read_back, rounded = as_stored(self.spec, self.checkpoint, self._formats)
        if rounded is self.checkpoint:
            return expected, expected
        return expected, reference_logits(read_back, rounded, np.array(ids[:STORED_TOKENS]))

    def _decoder(self, weights: Weights, progress: Progress = lambda part: None) -> onnx.ModelProto:
        capacity = cache_capacity(self.max_length)
        return build_decoder(self.spec, self.checkpoint, weights, self._formats, capacity=capacity, progress=progress)

    @cached_property
    def _formats(self) -> Formats:
        tensors = tensor_precisions(self.spec, self.tensor_precision) if self.tensor_precision else {}
        return Formats(self.lowering, self.precision, self.head_precision, tensors)

    def _info(self) -> ModelInfo:
        """Of a model that is not checked yet."""
        origins = self._provenance()
        return ModelInfo(
            graph=self.graph,
            architecture=self.spec.architecture,
            lowering=self.lowering,
            precision=self.precision,
            head_precision=self.head_precision,
            tensor_precision=self.tensor_precision,
            num_layers=self.spec.num_layers,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            vocab_size=self.spec.vocab_size,
            capacity=cache_capacity(self.max_length),
            cache_dtype=float_type(self.lowering, self.precision),
            min_rows=1,
            exactness="unprobed",
            device="",
            check={},
            tokenizer=self.tokenizer,
            taken_over=origins.get("taken_over", {}),
            rounded_anew=origins.get("rounded_anew", {}),
        )

    @property
    def _packs(self) -> bool:
        return can_pack(self._formats)

    @property
    def _routed(self) -> bool:
        return any(self.spec.routed(layer) for layer in range(self.spec.num_layers))

    def _provenance(self) -> dict[str, dict[str, int]]:
        return provenance(self.spec, self.checkpoint, self._formats)


def cache_capacity(max_length: int) -> int:
    """Cache positions: the longest sequence, and room behind it for the padding of the widest pass."""
    return -(-(max_length + PREFILL_CHUNK) // 8) * 8


def memory_bytes() -> int:
    """The machine's memory, or what a container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    return total if allowed == "max" else min(total, int(allowed))
