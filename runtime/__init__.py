"""The speculative loop, token choice and text. numpy and an engine, nothing else heavy."""

from outrider.engines.errors import OutriderError
from outrider.runtime.choose import TokenLogprobs
from outrider.runtime.commit import Origin
from outrider.runtime.generate import Pipeline
from outrider.runtime.generation import Generation, GenerationResult, StreamedToken
from outrider.runtime.sampling.options import SamplingOptions
from outrider.runtime.stats import DecodeStats

__all__ = [
    "DecodeStats",
    "Generation",
    "GenerationResult",
    "Origin",
    "OutriderError",
    "Pipeline",
    "SamplingOptions",
    "StreamedToken",
    "TokenLogprobs",
]
