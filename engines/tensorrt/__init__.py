"""TensorRT and TensorRT for RTX: engines built ahead of time, one optimization profile a plan."""

from outrider.engines.tensorrt.build import ANY, BuildOptions, build_engine, check_build, check_graph
from outrider.engines.tensorrt.engine import TensorrtEngine, check_built
from outrider.engines.tensorrt.library import LIBRARIES, load_library

__all__ = [
    "ANY",
    "LIBRARIES",
    "BuildOptions",
    "TensorrtEngine",
    "build_engine",
    "check_build",
    "check_built",
    "check_graph",
    "load_library",
]
