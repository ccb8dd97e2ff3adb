"""Which precisions there are, and what each means for activations, caches and the embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from outrider.engines.errors import OutriderError
from outrider.export.spec import DecoderSpec

PRECISIONS_OF = {"fused": ("fp32", "fp16", "int8", "int4"), "standard": ("fp32", "fp16", "bf16", "fp8", "int4")}
PRECISIONS = tuple(dict.fromkeys(PRECISIONS_OF["fused"] + PRECISIONS_OF["standard"]))
BITS = {"int8": 8, "int4": 4}  # of the precisions that are stored in blocks


@dataclass(frozen=True)
class Formats:
    """How a model is stored: its lowering, the precision of its matrices, and those of some that have their own.

    ``head`` is that of embedding and head, ``tensors`` those of projections, by stem; of one product all have the same.
    """

    lowering: str
    precision: str
    head: str
    tensors: Mapping[str, str] = field(default_factory=dict)

    def of(self, stem: str) -> str:
        """The precision of a projection."""
        return self.tensors.get(stem, self.precision)

    @property
    def precisions(self) -> tuple[str, ...]:
        """All that some matrix is stored in, the model's first."""
        return self.precision, self.head, *self.tensors.values()


def check_beside(option: str, lowering: str, precision: str, other: str) -> None:
    """Raises OutriderError for matrices in ``other`` that do not take the activations of those in ``precision``."""
    wanted = float_type(lowering, precision)
    fitting = [name for name in PRECISIONS_OF[lowering] if float_type(lowering, name) == wanted]
    if other not in fitting:
        raise OutriderError(
            f"{option} {other} does not go with --precision {precision} --lowering {lowering}; use "
            f"{' or '.join(fitting)}"
        )


def tensor_precisions(spec: DecoderSpec, patterns: dict[str, str]) -> dict[str, str]:
    """The precisions of projections that a pattern matches, by stem.

    Patterns are those of ``fnmatch`` over stems, such as ``*.down_proj`` or ``model.layers.0.*``; the last that matches
    counts. Projections of one product (query, key and value; gate and up) go together: one of them is enough.
    """
    found: dict[str, str] = {}
    for group in _products(spec):
        matching = [pattern for pattern in patterns if any(fnmatchcase(stem, pattern) for stem in group)]
        if matching:
            found |= dict.fromkeys(group, patterns[matching[-1]])
    return found


def check_patterns(spec: DecoderSpec, patterns: dict[str, str], source: Path) -> None:
    """Raises OutriderError for a pattern that matches no projection, or one of experts."""
    stems = [stem for group in _products(spec) for stem in group]
    experts = [name.removesuffix(".weight") for name in spec.expert_tensors()]
    for pattern, precision in patterns.items():
        for stem in (stem for stem in experts if fnmatchcase(stem, pattern)):
            raise OutriderError(
                f"--tensor-precision {pattern}={precision} matches {stem} in {source}, and experts keep --precision, "
                f"routers are float; use patterns that match neither, such as *.{spec.stem('o', 0).rpartition('.')[2]}"
            )
        if not any(fnmatchcase(stem, pattern) for stem in stems):
            raise OutriderError(
                f"--tensor-precision {pattern}={precision} matches none of {stems[0]} to {stems[-1]} in {source} "
                "(--head-precision is for embedding and head)"
            )


def _products(spec: DecoderSpec) -> Iterator[list[str]]:
    """The stems of the projections, those of one product together."""
    for layer in range(spec.num_layers):
        mlp = () if spec.routed(layer) else (spec.stacked(*spec.mlp_inputs), ("down",))
        for roles in (spec.stacked("q", "k", "v"), ("o",), *mlp):
            yield [spec.stem(role, layer) for role in roles]


def float_type(lowering: str, precision: str) -> str:
    """The dtype of activations and caches."""
    if precision == "bf16":
        return "bfloat16"
    return "float16" if precision == "fp16" or embeds_apart(lowering, precision) else "float32"


def embeds_apart(lowering: str, precision: str) -> bool:
    """Whether the embedding is stored in float beside the quantized matrices: TensorRT looks up no quantized rows."""
    return lowering == "standard" and precision in ("fp8", "int4")
