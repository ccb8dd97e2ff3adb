"""The user's folder of things that can be made again: engines that ONNX Runtime compiled, kernels of this GPU."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile


def cache_folder(name: str) -> Path | None:
    """A folder of this name under ``$XDG_CACHE_HOME``, by default ``~/.cache``; None where none can be made."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "outrider" / name
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # read-only, or a user without a home
        return None
    return folder


def store(path: Path, content: bytes) -> None:
    """Write a file at once or not at all. A cache is worth no failure: where it cannot be written, it is not."""
    with suppress(OSError), NamedTemporaryFile(dir=path.parent, delete=False) as file:
        new = Path(file.name)
        try:
            file.write(content)
            file.close()
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
