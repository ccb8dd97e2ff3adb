"""The runtime stays lean: what it must not import is not there after a whole request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FORBIDDEN = ("torch", "transformers", "onnx", "onnx_ir", "gguf", "safetensors", "optimum", "outrider.export")


def modules_after(code: str, *arguments: str) -> set[str]:
    program = f"{code}\nimport sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True)
    return set(result.stdout.split())


def test_importing_the_runtime_is_light() -> None:
    """No engine, tokenizer or template library before a bundle is loaded."""
    loaded = modules_after("import outrider.runtime")
    assert not loaded & {*FORBIDDEN, "onnxruntime", "tokenizers", "jinja2"}


def test_a_request_needs_neither_torch_nor_onnx(tiny_bundle: Path) -> None:
    code = (
        "import sys, outrider.runtime as r; p = r.Pipeline.load(sys.argv[1], threads=2); "
        "p.generate([{'role': 'user', 'content': 'the fox'}], k=2, max_new_tokens=4)"
    )
    assert not modules_after(code, str(tiny_bundle)) & set(FORBIDDEN)


def test_the_export_never_imports_torch(tiny: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from outrider.export import *; "
        "export_bundle(sys.argv[1], None, sys.argv[2], ExportOptions(max_length=32), threads=2)"
    )
    assert not modules_after(code, str(tiny), str(tmp_path / "bundle")) & {"torch", "transformers", "optimum"}
