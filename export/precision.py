"""Which precisions there are, and what each means for activations, caches and the embedding."""

from __future__ import annotations

from outrider.engines.errors import OutriderError

PRECISIONS_OF = {"fused": ("fp32", "fp16", "int8", "int4"), "standard": ("fp32", "fp16", "bf16", "fp8", "int4")}
PRECISIONS = tuple(dict.fromkeys(PRECISIONS_OF["fused"] + PRECISIONS_OF["standard"]))
BITS = {"int8": 8, "int4": 4}  # of the precisions that are stored in blocks


def check_head_precision(lowering: str, precision: str, head_precision: str) -> None:
    """Raises OutriderError for a head that does not take the activations of the other matrices."""
    wanted = float_type(lowering, precision)
    fitting = [name for name in PRECISIONS_OF[lowering] if float_type(lowering, name) == wanted]
    if head_precision not in fitting:
        raise OutriderError(
            f"--head-precision {head_precision} does not go with --precision {precision} --lowering {lowering}; use "
            f"{' or '.join(fitting)}"
        )


def float_type(lowering: str, precision: str) -> str:
    """The dtype of activations and caches."""
    if precision == "bf16":
        return "bfloat16"
    return "float16" if precision == "fp16" or embeds_apart(lowering, precision) else "float32"


def embeds_apart(lowering: str, precision: str) -> bool:
    """Whether the embedding is stored in float beside the quantized matrices: TensorRT looks up no quantized rows."""
    return lowering == "standard" and precision in ("fp8", "int4")
