"""The speculative loop, token choice and text. numpy and an engine, nothing else heavy."""

from outrider.engines.errors import OutriderError
from outrider.runtime.commit import Origin
from outrider.runtime.generate import Generation, GenerationResult, Pipeline, StreamedToken
from outrider.runtime.stats import DecodeStats

__all__ = ["DecodeStats", "Generation", "GenerationResult", "Origin", "OutriderError", "Pipeline", "StreamedToken"]
