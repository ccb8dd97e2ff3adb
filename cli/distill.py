"""``outrider distill``"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from outrider.cli import options
from outrider.engines.errors import OutriderError
from outrider.runtime.bench import read_prompts


@click.command()
@click.argument("target")
@click.option("--out", type=Path, required=True, help="Folder of the draft to create; OUT.work keeps what came before.")
@click.option("--minutes", type=float, default=90.0, show_default=True, help="45 % to write text, 45 % to train.")
@click.option("--kind", default="tiny", show_default=True, help="tiny, or layers:0,1,28,29 to begin as the target's.")
@click.option("--prompts", type=Path, help="JSON lines with `prompt`: what your users ask.  [default: made up]")
@click.option("--tokens", type=int, help="Of text, whatever the time.")
@click.option("--steps", type=int, help="Of training, whatever the time.")
@click.option("--max-length", type=int, default=288, show_default=True, help="Tokens of a sequence of text.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--resume", is_flag=True, help="Go on with what an interrupted run left.")
@options.threads
@options.as_json
def distill(
    target: str,
    out: Path,
    minutes: float,
    kind: str,
    prompts: Path | None,
    tokens: int | None,
    steps: int | None,
    max_length: int,
    seed: int,
    resume: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Make a draft model for TARGET out of the target's own text; no data set is needed."""
    with options.extras("cpu,export,distill"):
        from outrider.distill import DistillOptions, card_table, distill_draft

    settings = DistillOptions(kind, minutes, tokens, steps, max_length, seed)
    texts = read_prompts(prompts) if prompts else []
    with options.share_bar("distill") as show:
        try:
            report = distill_draft(target, out, settings, texts, threads=threads, resume=resume, progress=show)
        except KeyboardInterrupt:
            raise OutriderError(f"interrupted; the same command with --resume goes on with {out}.work") from None
    click.echo(json.dumps(asdict(report), indent=2) if as_json else card_table(report))
    click.echo(f"draft  {out}; use it with `outrider export --target {target} --draft {out}`", err=as_json)
