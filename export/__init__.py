"""Checkpoint -> bundle. Runs in CI; needs numpy, onnx and ONNX Runtime, never PyTorch."""

from outrider.export.export import ExportOptions, export_bundle

__all__ = ["ExportOptions", "export_bundle"]
