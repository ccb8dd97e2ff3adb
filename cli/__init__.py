"""The command line: thin, every command parses, calls and prints."""

from outrider.cli.main import main

__all__ = ["main"]
