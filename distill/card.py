"""The card of a draft: how it was made, and what it brings."""

from __future__ import annotations

from pathlib import Path

from outrider.distill.options import DistillOptions
from outrider.distill.report import DistillReport


def card(target: str, options: DistillOptions, report: DistillReport) -> str:
    """Markdown."""
    asked = f"--kind {options.kind} --minutes {options.minutes:g} --seed {options.seed}"
    for name, value in (("tokens", options.tokens), ("steps", options.steps)):
        asked += "" if value is None else f" --{name} {value}"
    return (
        f"# A draft for {Path(target).name}\n\nMade by `outrider distill` ({asked}) from the target's own text; the "
        "target's licence holds for it. `outrider export --target TARGET --draft FOLDER` takes it.\n\n"
        f"{card_table(report)}\n"
    )


def card_table(report: DistillReport) -> str:
    """Markdown, without a heading."""
    measured = report.measured
    written = "" if report.chat else " without a chat template, which it has not"
    if report.tokens_per_second:
        written += f", {report.tokens_per_second:.0f} a second"
    if report.prompts_too_long:
        written += f"; {report.prompts_too_long} prompts were too long"
    lines = [
        "| | |",
        "|---|---|",
        f"| text | {report.tokens:,} tokens that the target wrote{written} |",
        f"| training | {report.steps:,} steps in {report.seconds / 60:.0f} min, {report.parameters / 1e6:.1f}M "
        "parameters (embedding: the target's) |",
        f"| reduced head | covers {report.coverage:.1%} of the target's probability |",
        f"| held-out text | greedy agreement {report.agreement.greedy:.3f}, overlap {report.agreement.overlap:.3f} |",
        f"| table of next tokens | {report.table_entries:,} entries |",
        "",
        f"Measured with the target in int4: a target pass takes {measured.plain_ms:.2f} ms, a draft step "
        f"c = {measured.draft_cost:.3f} of it. alpha by position: "
        + ", ".join(f"{alpha:.2f}" for alpha in measured.alpha)
        + ".",
        "",
        "| K | mean acceptance length | alpha | v(K) | predicted speed-up | measured |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.k} | {row.mean_acceptance_length:.2f} | {row.draft_acceptance_rate:.2f} | {row.verify_cost:.2f} | "
        f"{row.predicted:.2f}x | {row.measured:.2f}x |"
        for row in measured.by_k
    ]
    lines += ["", "| category (K = 4) | mean acceptance length | speed-up |", "|---|---|---|"]
    lines += [f"| {name} | {length:.2f} | {speed:.2f}x |" for name, (length, speed) in measured.categories.items()]
    return "\n".join(lines)
