"""Running Optimum's ONNX exporter: a process of its own, for it needs PyTorch and an older transformers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from outrider.engines.errors import OutriderError

PYTHON = "OUTRIDER_OPTIMUM_PYTHON"  # environment variable: the interpreter to run it with, by default our own
_SETUP = (
    "make an environment with it (`python3 -m venv optimum-env`, `optimum-env/bin/pip install 'outrider[optimum]'`) "
    f"and set {PYTHON} to its bin/python"
)
_VERSION = "import importlib.metadata as m; print(m.version('optimum-onnx'))"
_ERROR = re.compile(r"[\w.]*(Error|Exception|Fail)\w*: ")
# transformers goes on with random weights for those that are missing, and only warns.
_OTHER_WEIGHTS = re.compile(r"^Some weights of .*", re.MULTILINE)
_OPTIONS = {"--task": "text-generation-with-past", "--framework": "pt", "--device": "cpu", "--dtype": "fp32"}


def export_onnx(checkpoint: Path, folder: Path) -> Path:
    """Have a local checkpoint traced; code inside the checkpoint is never run, and nothing is downloaded.

    Args:
        folder: made here; weights come beside the graph.

    Returns:
        The path of the graph.

    Raises:
        OutriderError: there is no such interpreter, it has no Optimum, Optimum does not export the checkpoint, or
            tensors are missing or left over.
    """
    folder.mkdir()
    if _run(["-c", _VERSION], folder).returncode:
        raise OutriderError(f"Optimum's ONNX exporter is not installed for {_python()}; {_SETUP}")
    options = [part for option in _OPTIONS.items() for part in option]
    arguments = [*options, "--no-post-process", "--model", str(checkpoint.resolve()), str(folder.resolve())]
    done = _run(["-m", "optimum.exporters.onnx", *arguments], folder)
    path = folder / "model.onnx"
    if done.returncode or not path.is_file():
        reason = _reason(done.stderr) or f"it ended with {done.returncode} and wrote no model.onnx"
        raise OutriderError(f"Optimum does not export {checkpoint}: {reason}")
    if other := _OTHER_WEIGHTS.search(done.stderr):
        raise OutriderError(f"{checkpoint} has not just the tensors of its architecture: {other[0]}")
    return path


def _reason(stderr: str) -> str:
    """The last error says what failed, the first what it followed from."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)] or lines[-1:]
    return " from ".join(dict.fromkeys([*errors[-1:], *errors[:1]]))


def _python() -> str:
    python = os.environ.get(PYTHON) or sys.executable
    return str(Path(python).absolute()) if os.sep in python else python


def _run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """In isolated mode: no module of ours or of the folder we are in comes before those of its environment."""
    settings = {"HF_HUB_OFFLINE": "1", "FORCE_ONNX_EXTERNAL_DATA": "1", "TRANSFORMERS_VERBOSITY": "warning"}
    try:
        return subprocess.run(
            [_python(), "-I", *arguments],
            cwd=folder,
            env=os.environ | settings,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise OutriderError(f"{_python()} does not run ({error.strerror or error}); {_SETUP}") from None
