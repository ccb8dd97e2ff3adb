"""The ``outrider`` command: parse, call, print. Failures of the user's making are one line and exit code 1."""

from __future__ import annotations

import sys
from typing import Any

import click

from outrider.engines.errors import OutriderError


class _Group(click.Group):
    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except OutriderError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(1)
        except BrokenPipeError:
            sys.exit(1)
        except OSError as error:  # a file that may not be read, a name that is too long, a full disk
            click.echo(f"error: {error.filename or 'system'}: {error.strerror or error}", err=True)
            sys.exit(1)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="outrider")
def main() -> None:
    """Speculative decoding for people who deploy."""


def _add_commands() -> None:
    from outrider.cli.bench import bench
    from outrider.cli.build import build
    from outrider.cli.distill import distill
    from outrider.cli.export import export
    from outrider.cli.generate import chat, generate
    from outrider.cli.inspect import inspect
    from outrider.cli.serve import serve
    from outrider.cli.tune import tune_command

    for command in (export, distill, build, inspect, tune_command, generate, chat, serve, bench):
        main.add_command(command)


_add_commands()
