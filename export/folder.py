"""The folder that an export writes: unseen until it is whole, kept when an interruption leaves much to go on with."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from outrider.engines.errors import OutriderError
from outrider.export.weights import JOURNAL, read_journal, write_note

_ORDER = ".order.json"  # what is being exported; an interrupted export goes on with the same only


@contextmanager
def new_bundle(folder: str | Path, order: str = "", *, resume: bool = False) -> Iterator[Path]:
    """A folder beside ``folder`` that becomes it when the block ends well, and vanishes when it does not.

    Where the process is interrupted or killed, or the system gives an error (a full disk), it stays if a journal of
    weights is in it (``WeightFile``).

    Args:
        order: what is exported, with all settings (``describe``).
        resume: go on in what an interrupted export of the same order left, if there is any.

    Raises:
        OutriderError: ``folder`` exists, its parent does not, an interrupted export is in the way, was another or is
            damaged, or the disk is full.
    """
    folder = check_out(folder)
    work = _work(folder)
    try:
        work.mkdir(exist_ok=True)
        with claimed(work):
            _check_left(work, order, resume)
            with _kept_if_begun(work):
                if not (work / _ORDER).exists():
                    write_note(work / _ORDER, order)
                yield work
                work.rename(folder)
                for path in (*folder.rglob(f"{_ORDER}*"), *folder.rglob(f"{JOURNAL}*")):
                    path.unlink()
    except OSError as error:
        raise OutriderError(f"could not write {folder}: {error.strerror or error}; {_left(folder)}") from error


def check_out(folder: str | Path) -> Path:
    """Raises OutriderError where a new folder cannot be made."""
    folder = Path(folder)
    try:
        if folder.exists():
            raise OutriderError(f"{folder} exists; remove it or choose another --out")
        if not folder.parent.is_dir():
            raise OutriderError(f"there is no folder {folder.parent}; create it or choose another --out")
    except OSError as error:
        raise OutriderError(f"could not write {folder}: {error.strerror or error}") from error
    return folder


def check_room(folder: Path, need: int) -> None:
    """Raises OutriderError where the disk has not ``need`` bytes; what an interrupted export left is room too."""
    free = shutil.disk_usage(folder.absolute().parent).free + left_bytes(folder)
    if need > free:
        raise OutriderError(
            f"{folder} needs {need / 1e9:.1f} GB, and its disk has {free / 1e9:.1f} GB free; free some or choose "
            "another --out"
        )


def left_bytes(folder: Path) -> int:
    """How much of an interrupted export is there to go on with."""
    work = _work(folder)
    return sum(path.stat().st_size for path in work.rglob("*") if path.is_file()) if _begun(work) else 0


def interrupted(folder: Path) -> str:
    """What an interruption left behind, in words."""
    return f"interrupted; {_left(folder)}"


def _left(folder: Path) -> str:
    size = left_bytes(folder)
    if not size:
        return "nothing was kept"
    return f"{_work(folder)} keeps {size / 1e9:.1f} GB: the same command with --resume goes on from there"


def describe(sources: list[Path], settings: object) -> str:
    """Sources with the sizes and times of their files, settings, and the version that exports them, as a digest."""
    files = [path for source in sources for path in ([source] if source.is_file() else sorted(source.iterdir()))]
    stamps = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr((stamps, settings, version("outrider"))).encode()).hexdigest()


def _work(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _check_left(work: Path, order: str, resume: bool) -> None:
    """Raises OutriderError for what cannot be gone on with; what was hardly begun is removed."""
    if not _begun(work):
        for path in work.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return
    if not resume:
        raise OutriderError(f"{work} is an interrupted export; go on with --resume, or remove it")
    note = work / _ORDER
    try:
        same = json.loads(note.read_text(encoding="utf-8")) == order
        for note in work.rglob(JOURNAL):
            read_journal(note)
    except (OSError, ValueError) as error:
        raise OutriderError(
            f"{work} is an interrupted export that cannot go on ({note.relative_to(work)}: {error}); remove it and "
            "export again"
        ) from error
    if not same:
        raise OutriderError(
            f"{work} is an interrupted export of another checkpoint or with other options; remove it, or give the same "
            "command"
        )


def _begun(work: Path) -> bool:
    return any(work.rglob(JOURNAL))


@contextmanager
def _kept_if_begun(work: Path) -> Iterator[None]:
    """After an error what there is goes, but for one that may not come again where much is there to go on with."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, (KeyboardInterrupt, OSError)) or not _begun(work):
            shutil.rmtree(work, ignore_errors=True)
        raise


@contextmanager
def claimed(work: Path) -> Iterator[None]:
    """One process at a time, where the system has locks of this kind; a lock ends with its process.

    Raises:
        OutriderError: another has it.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise OutriderError(f"another process is writing {work}; wait for it or choose another --out") from None
    try:
        yield
    finally:
        os.close(handle)
