#!/usr/bin/env python3
"""Make tests/golden/traces: what Optimum's ONNX exporter gives for the tiny models of tests/traced.py.

    OUTRIDER_OPTIMUM_PYTHON=optimum-env/bin/python make_traces.py [FAMILY ...]

Run it with the tests' own environment (transformers 5); see docs/export.md for Optimum's.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click
import onnx

from outrider.export.optimum.process import export_onnx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from traced import FAMILIES, REFUSED, TRACES, write_checkpoint


@click.command()
@click.argument("families", nargs=-1)
def main(families: tuple[str, ...]) -> None:
    TRACES.mkdir(parents=True, exist_ok=True)
    for name in families or (*FAMILIES, *REFUSED):  # some 20 s each
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = write_checkpoint(name, Path(folder) / name)
            model = onnx.load(export_onnx(checkpoint, Path(folder) / "traced"))
        for node in model.graph.node:
            node.ClearField("metadata_props")
            node.ClearField("doc_string")
        onnx.save(model, TRACES / f"{name}.onnx")
        click.echo(f"{name}: {(TRACES / f'{name}.onnx').stat().st_size} bytes")


if __name__ == "__main__":
    main()
