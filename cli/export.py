"""``outrider export``"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import click

from outrider.cli import options
from outrider.engines.bundle import CUT_GRAPH, Manifest, ModelInfo
from outrider.engines.errors import OutriderError


@click.command()
@click.option("--target", required=True, help="Checkpoint: a Hugging Face folder, a GGUF file or a hub id.")
@click.option(
    "--draft",
    required=True,
    help="Checkpoint of the draft model, `layers:0-3,26-29` for some of the target's layers, or `none`.",
)
@click.option(
    "--translate-draft",
    is_flag=True,
    help="Take a draft with another tokenizer: its drafts are translated as text (universal assisted decoding).",
)
@click.option("--out", type=Path, required=True, help="Folder to create.")
@click.option(
    "--precision",
    default="int4",
    show_default=True,
    help="fp32, fp16, int8 or int4; with standard fp32, fp16, bf16, fp8 or int4.",
)
@click.option("--lowering", help="fused (ONNX Runtime) or standard (opset 24).  [default: fused]")
@click.option("--via", help="optimum: for an architecture without a file here (docs/export.md).")
@click.option("--head-precision", help="Of embedding and head.  [default: the same]")
@click.option(
    "--tensor-precision",
    type=options.tensor_precision,
    metavar="PATTERN=P,...",
    default="",
    help="Of the target's matrices of these names, such as '*.down_proj=int8'.",
)
@click.option("--draft-precision", help="Of the draft.  [default: the same]")
@click.option("--draft-lowering", help="Of the draft, as for one that runs on another device.  [default: the same]")
@click.option(
    "--k",
    "tiers",
    type=options.tiers,
    metavar="K,K,...",
    default="2,4,8",
    show_default=True,
    help="Draft tokens a round to serve.",
)
@click.option("--max-length", default=2048, show_default=True, help="Longest sequence, prompt and output, in tokens.")
@click.option("--resume", is_flag=True, help="Go on where an interrupted export stopped, if there is one.")
@options.threads
@options.as_json
def export(
    target: str,
    draft: str,
    translate_draft: bool,
    out: Path,
    precision: str,
    lowering: str | None,
    via: str | None,
    head_precision: str | None,
    tensor_precision: dict[str, str],
    draft_precision: str | None,
    draft_lowering: str | None,
    tiers: tuple[int, ...],
    max_length: int,
    resume: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Export a target and its draft into a checked bundle."""
    with options.extras("cpu,export"):
        from outrider.export import ExportOptions, export_bundle
        from outrider.export.folder import interrupted

    settings = ExportOptions(
        precision,
        lowering,
        tiers,
        max_length,
        draft_precision,
        draft_lowering,
        head_precision,
        tensor_precision,
        translate_draft,
        via,
    )
    start = time.perf_counter()
    with options.share_bar("export") as show:
        try:
            manifest = export_bundle(
                target,
                None if draft == "none" else draft,
                out,
                settings,
                threads=threads,
                resume=resume,
                progress=lambda stage, done, total: show(stage, done / total),
            )
        except KeyboardInterrupt:
            raise OutriderError(interrupted(out)) from None
    if as_json:
        click.echo(json.dumps({"bundle": str(out), **asdict(manifest)}, indent=2))
    else:
        _print(out, manifest, time.perf_counter() - start)


def _print(out: Path, manifest: Manifest, seconds: float) -> None:
    for role, model in (("target", manifest.target), ("draft", manifest.draft)):
        if model is None:
            continue
        click.echo(f"{role:7} {_described(out, model)}")
    if manifest.translated:
        click.echo("draft   has a tokenizer of its own: what it drafts is translated as text")
    click.echo(f"bundle  {out} (K = {', '.join(map(str, manifest.tiers))}; {seconds:.1f} s)")


def _described(out: Path, model: ModelInfo) -> str:
    size, check = (out / model.weights).stat().st_size / 1e6, model.check
    stored = "the target's weights" if model.graph == CUT_GRAPH else f"{size:.1f} MB"
    compared = (
        "" if check["layers"] == model.num_layers else f" ({check['layers']:.0f} of its {model.num_layers} layers)"
    )
    # Of a few layers alone it would be no model's.
    perplexity = "" if compared else f"perplexity {check['perplexity']:.4g} ({check['perplexity_checkpoint']:.4g}), "
    return (
        f"{model.architecture}, {model.num_layers} layers, {_precision(model)}, {stored}; over {check['tokens']:.0f} "
        f"tokens against the checkpoint{compared}: {perplexity}greedy agreement {check['same_argmax']:.1%}, "
        f"KL {check['kl']:.2g} ({check['kl_stored']:.1g} from the weights as stored), logits within "
        f"{check['max_difference']:.2g}; rows {describe_rows(model.exactness, model.min_rows)}{_provenance(model)}"
    )


def _precision(model: ModelInfo) -> str:
    others = [f"{pattern} in {precision}" for pattern, precision in model.tensor_precision.items()]
    if model.head_precision != model.precision:
        others.insert(0, f"a head in {model.head_precision}")
    return model.precision if not others else f"{model.precision} with {', '.join(others)}"


def _provenance(model: ModelInfo) -> str:
    """Of a quantized checkpoint: what is the file's own."""
    own, rounded = sum(model.taken_over.values()), sum(model.rounded_anew.values())
    if not own + rounded:
        return ""
    types = ", ".join(f"{count} {name}" for name, count in model.rounded_anew.items())
    return f"; {own} of {own + rounded} matrices as the file holds them" + (f", rounded anew: {types}" if types else "")


def describe_rows(exactness: str, min_rows: int) -> str:
    """What the row probe found, in words."""
    if exactness == "unprobed":
        return "not probed: no engine here runs them"
    if exactness == "fixed-rows":
        return f"bit-equal in passes of {min_rows} rows, which all take"
    if exactness != "bitwise":
        return "equal within a tolerance only"
    return "bit-equal from one row up" if min_rows == 1 else f"bit-equal from {min_rows} rows up"
