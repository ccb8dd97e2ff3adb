"""Damaging files, and what a refusal looks like: one line, from the library and from the command."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from outrider.cli import main
from outrider.runtime import OutriderError

Change = Callable[[Path], Path | None]  # damages a folder; may return another path to use instead


def write(name: str, content: str | bytes) -> Change:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data) and None


def remove(*names: str) -> Change:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def cut(name: str, size: Callable[[int], int]) -> Change:
    return lambda folder: os.truncate(folder / name, size((folder / name).stat().st_size))


def flip(name: str, position: int) -> Change:
    def change(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[position] ^= 1
        (folder / name).write_bytes(data)

    return change


def edit(name: str, change: Callable[[Any], Any]) -> Change:
    """Change a JSON file: the function changes the content in place, or returns another."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        changed = change(content)
        (folder / name).write_text(json.dumps(content if changed is None else changed))

    return damage


def link_out(name: str) -> Change:
    """Replace a file by a link to the same bytes outside."""

    def damage(folder: Path) -> None:
        outside = (folder / name).rename(folder.parent / f"outside-{name}")
        (folder / name).symlink_to(outside)

    return damage


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(OutriderError) as caught:
        call()
    message = str(caught.value)
    assert message and len(message.splitlines()) == 1
    return message


def cli(*args: Any, **more: Any) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], **more)


def refused_by_cli(*args: Any, **more: Any) -> str:
    result = cli(*args, **more)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1
    return result.stderr.removeprefix("error: ").removesuffix("\n")
