"""The library that builds and runs engines: ``tensorrt`` or ``tensorrt_rtx``, whose Python API is the same."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from outrider.engines.errors import OutriderError

# name -> (module, how to install it)
LIBRARIES = {
    "tensorrt": (
        "tensorrt",
        "run `pip install tensorrt` on the GPU machine, or use tensorrt-rtx, which builds without one",
    ),
    "tensorrt-rtx": ("tensorrt_rtx", "run `pip install 'outrider[tensorrt]'`"),
}

Progress = Callable[[str, float], None]  # what is being done, and the share of the whole that is


@dataclass(frozen=True)
class Library:
    """An imported library; ``log`` keeps what it complains of."""

    name: str
    module: Any
    version: str
    log: Log


class Log:
    """Errors that the library logged since the last ``take``: its functions return None or False and no reason."""

    def __init__(self, module: Any) -> None:
        errors: list[str] = []

        class Logger(module.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                module.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in (module.ILogger.Severity.ERROR, module.ILogger.Severity.INTERNAL_ERROR):
                    errors.append(message)

        self._errors = errors
        self.logger = Logger()

    def take(self) -> str:
        """The first two errors, in one line; they are forgotten then."""
        text = "; ".join(self._errors[:2]) or "no reason was given"
        self._errors.clear()
        return text


def load_library(name: str) -> Library:
    """Import a library.

    Raises:
        OutriderError: there is no such library, or it is not installed.
    """
    if name not in LIBRARIES:
        raise OutriderError(f"unknown engine {name!r}; choose one of {', '.join(LIBRARIES)}")
    module_name, advice = LIBRARIES[name]
    try:
        module = import_module(module_name)
        version = str(module.__version__)
    except (ImportError, OSError, AttributeError) as error:  # OSError: a library of CUDA is missing
        raise OutriderError(f"{module_name} cannot be imported ({error}); {advice}") from None
    return Library(name, module, version, Log(module))


class Interrupts:
    """While it is entered, an interrupt from the keyboard is noted, not raised.

    The library calls back into Python in a build, and an exception there would end in code that knows none of them.
    """

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a job in the background has none to fear
            with suppress(ValueError):  # nor has another thread than the main one
                self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, *_: object) -> None:
        self.came = True


def progress_monitor(module: Any, report: Progress, interrupts: Interrupts) -> Any:
    """An ``IProgressMonitor`` that reports the share of all nested phases that is done, and stops at an interrupt."""

    class Monitor(module.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)
            self._phases: dict[str, tuple[str | None, int, int]] = {}  # name -> (parent, steps done, steps)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._phases[phase_name] = (parent_phase, 0, max(1, num_steps))
            self._report(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            parent, _, steps = self._phases[phase_name]
            self._phases[phase_name] = (parent, step + 1, steps)
            self._report(phase_name)
            return not interrupts.came

        def phase_finish(self, phase_name: str) -> None:
            self._phases.pop(phase_name, None)

        def _report(self, name: str) -> None:
            share, phase = 0.0, name
            while True:
                parent, done, steps = self._phases[phase]
                share = min(1.0, (done + share) / steps)
                if parent is None or parent not in self._phases:
                    break
                phase = parent
            report(name, share)

    return Monitor()
