"""What the runs say: pure functions of what workers replied."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS = "outrider"
AUTO = "auto"  # Outrider's setting that chooses for itself


@dataclass
class Arm:
    """A peer with a setting. ``runs`` are its replies by prompt, one a round; ``failure`` is why it has no more."""

    peer: str
    setting: str
    runs: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    failure: str | None = None

    @property
    def name(self) -> str:
        return f"{self.peer}, {self.setting}"

    def add(self, prompt: int, reply: dict[str, Any]) -> None:
        self.runs.setdefault(prompt, []).append(reply)

    def seconds_per_token(self, prompt: int) -> float:
        """Of the fastest round: whatever else the machine did in the others only added to it."""
        return min(run["seconds"] / run["tokens"] for run in self.runs[prompt])

    @property
    def median_seconds(self) -> float:
        """A token, over prompts."""
        return statistics.median(self.seconds_per_token(prompt) for prompt in self.runs)

    def total(self, what: str) -> float | None:
        """Over all runs; None where the peer does not tell."""
        values = [run.get(what) for runs in self.runs.values() for run in runs]
        return None if None in values else sum(value for value in values if value is not None)

    def share(self, what: str, of: str) -> float | None:
        part, whole = self.total(what), self.total(of)
        return part / whole if part is not None and whole else None

    def same_ids(self, reference: Arm) -> int:
        """On how many prompts every run gave the ids of the reference's first."""
        return sum(
            all(run["ids"] == reference.runs[prompt][0]["ids"] for run in runs)
            for prompt, runs in self.runs.items()
            if prompt in reference.runs
        )


def turns(arms: Sequence[Arm], num_prompts: int, rounds: int) -> Iterator[tuple[int, Arm]]:
    """Prompt after prompt through all arms, and so again each round; their order is reversed from one to the next."""
    for number in range(rounds):
        for prompt in range(num_prompts):
            for arm in arms if (prompt + number) % 2 == 0 else arms[::-1]:
                yield prompt, arm


@dataclass(frozen=True)
class Report:
    """``categories`` of the prompts, in their order; ``references`` name the setting of each peer whose ids count.

    Arms that failed stand in no comparison.
    """

    arms: list[Arm]
    categories: list[str]
    references: dict[str, str]

    @property
    def done(self) -> list[Arm]:
        return [arm for arm in self.arms if arm.failure is None]

    @property
    def plain(self) -> list[Arm]:
        return [arm for arm in self.done if arm.setting == "plain"]

    @property
    def best_plain(self) -> Arm | None:
        """Plain decoding at its fastest, of all peers."""
        return min(self.plain, key=lambda arm: arm.median_seconds, default=None)

    def of(self, peer: str, setting: str) -> Arm | None:
        return next((arm for arm in self.done if (arm.peer, arm.setting) == (peer, setting)), None)

    def speed_up(self, arm: Arm, over: Arm | None, category: str | None = None) -> float | None:
        """Median over prompts of the seconds a token of ``over`` / those of ``arm``."""
        if over is None:
            return None
        prompts = [number for number, kind in enumerate(self.categories) if category in (None, kind)]
        return statistics.median(over.seconds_per_token(n) / arm.seconds_per_token(n) for n in prompts)

    def best(self, peer: str, category: str | None = None) -> Arm:
        """The peer's fastest setting there; of Outrider the fastest that is fixed."""
        arms = [arm for arm in self.done if arm.peer == peer and arm.setting != AUTO]
        return max(arms, key=lambda arm: self.speed_up(arm, arms[0], category) or 0.0)

    def rows(self) -> list[dict[str, Any]]:
        """One for each arm."""
        rows = []
        for arm in self.arms:
            row: dict[str, Any] = {"peer": arm.peer, "setting": arm.setting, "failure": arm.failure}
            rows.append(row)
            if arm.failure is not None:
                continue
            own, reference = self.of(arm.peer, "plain"), self.of(arm.peer, self.references[arm.peer])
            by_category = {kind: self.speed_up(arm, self.best_plain, kind) for kind in dict.fromkeys(self.categories)}
            row |= {
                "ms_per_token": 1e3 * arm.median_seconds,
                "over_own_plain": self.speed_up(arm, own),
                "over_best_plain": self.speed_up(arm, self.best_plain),
                "over_best_plain_by_category": by_category,
                "tokens_per_pass": arm.share("tokens", "passes"),
                "draft_acceptance_rate": arm.share("accepted", "proposed"),
                "same_ids": arm.same_ids(reference) if reference else None,
                "ms_per_token_by_prompt": [1e3 * arm.seconds_per_token(n) for n in range(len(self.categories))],
            }
        return rows

    def comparisons(self) -> list[dict[str, Any]]:
        """For each peer, overall (category None) and by category: its best setting, and Outrider's speed over it."""
        if self.of(OURS, "plain") is None:
            return []
        ours = {"best": self.best(OURS), "auto": self.of(OURS, AUTO)}
        found = []
        for peer in dict.fromkeys(arm.peer for arm in self.done if arm.peer != OURS):
            for category in [None, *dict.fromkeys(self.categories)]:
                theirs = self.best(peer, category)
                entry: dict[str, Any] = {"peer": peer, "category": category, "setting": theirs.setting}
                entry |= {name: self.speed_up(arm, theirs, category) for name, arm in ours.items() if arm}
                found.append(entry)
        return found

    def agreement(self) -> dict[str, int]:
        """By peer, on how many prompts its plain ids are those of Outrider: of all where both compute in float32."""
        ours = self.of(OURS, self.references.get(OURS, ""))
        return {arm.peer: arm.same_ids(ours) for arm in self.plain if arm.peer != OURS} if ours else {}

    def as_dict(self) -> dict[str, Any]:
        return {
            "best_plain": self.best_plain.name if self.best_plain else None,
            "arms": self.rows(),
            "outrider_over_peers": self.comparisons(),
            "plain_ids_as_outrider": self.agreement(),
        }


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(report: Report) -> str:
    width = max(len(arm.name) for arm in report.arms)
    lines = [f"{'':{width}}  ms/tok  own plain  best plain  tok/pass  alpha  same ids"]
    for arm, row in zip(report.arms, report.rows(), strict=True):
        if arm.failure is not None:
            lines.append(f"{arm.name:{width}}  {arm.failure}")
            continue
        own, best = _figure(row["over_own_plain"], ".2f"), _figure(row["over_best_plain"], ".2f")
        length, alpha = _figure(row["tokens_per_pass"], ".2f"), _figure(row["draft_acceptance_rate"], ".2f")
        same = "-" if row["same_ids"] is None else f"{row['same_ids']} of {len(report.categories)}"
        lines.append(
            f"{arm.name:{width}}  {row['ms_per_token']:6.2f}  {own:>8}x  {best:>9}x  {length:>8}  {alpha:>5}  {same:>8}"
        )
    if agreement := report.agreement():
        counts = ", ".join(f"{peer} {count} of {len(report.categories)}" for peer, count in agreement.items())
        lines += ["", f"plain ids that are Outrider's too: {counts}"]
    return "\n".join([*lines, *_comparison_lines(report)])


def _comparison_lines(report: Report) -> list[str]:
    found = report.comparisons()
    if not found:
        return []
    columns = ["overall", *dict.fromkeys(report.categories)]
    width = max(14, *(len(entry["setting"]) + 2 for entry in found))
    lines = ["", "Outrider's tokens/s over the best setting of each peer, which is named above (median over prompts)"]
    lines.append(" " * 24 + "".join(f"{column:>{width}}" for column in columns))
    for peer in dict.fromkeys(entry["peer"] for entry in found):
        entries = [entry for entry in found if entry["peer"] == peer]
        lines.append(f"{peer:24}" + "".join(f"{entry['setting']:>{width}}" for entry in entries))
        for key, setting in (("best", report.best(OURS).setting), ("auto", AUTO)):
            if key in entries[0]:
                lines.append(f"  {setting:22}" + "".join(f"{entry[key]:>{width - 1}.2f}x" for entry in entries))
    return lines


def plot(report: Report, path: Path) -> None:
    """Bars of the speed over the best plain decoding; the format goes by the file's name."""
    from matplotlib.figure import Figure

    arms = report.done[::-1]
    peers = list(dict.fromkeys(arm.peer for arm in report.done))
    figure = Figure(figsize=(8, 1 + 0.25 * len(arms)), layout="constrained")
    axes = figure.add_subplot()
    speeds = [report.speed_up(arm, report.best_plain) or 0.0 for arm in arms]
    bars = axes.barh([arm.name for arm in arms], speeds, color=[f"C{peers.index(arm.peer)}" for arm in arms])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.margins(y=0.01)
    axes.set_xlabel(f"speed over {report.best_plain.name if report.best_plain else '-'} (median over prompts)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
