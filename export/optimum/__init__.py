"""Architectures without a file in ``export/architectures``, by way of Hugging Face Optimum's ONNX exporter.

checkpoint -> traced graph (``process``, ``trace``) -> the graph contract (``geometry``, ``rewrite``) -> precision
(``narrow``) -> bundle (``emit``). Optimum runs in a process of its own; nothing here imports it.
"""

from outrider.export.optimum.decoder import (
    TracedDecoder,
    TracedExport,
    check_traced_options,
    traced_decoder,
    traced_lowering,
    traces_beside,
)

__all__ = [
    "TracedDecoder",
    "TracedExport",
    "check_traced_options",
    "traced_decoder",
    "traced_lowering",
    "traces_beside",
]
