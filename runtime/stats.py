"""What a request cost and what speculation brought, under the field's names (vLLM's per-request metrics)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from time import perf_counter
from typing import Any, Protocol

from outrider.runtime.controller import Choice


class Timed(Protocol):
    """Something whose seconds are counted."""

    @property
    def seconds(self) -> float: ...


class Worker(Timed, Protocol):
    """Something whose engine work is counted: passes run and the seconds they took."""

    @property
    def passes(self) -> int: ...


@dataclass
class SourceStats:
    """Rounds in which a controller chose one source of drafts: how many with each K, and what it expected of them.

    ``expected_tokens`` and ``expected_seconds`` are sums over the rounds, as ``tokens`` is of what they committed;
    ``drafted`` counts the tokens that the model drafted in them, verified or not.
    """

    rounds_by_k: dict[int, int] = field(default_factory=dict)
    drafted: int = 0
    tokens: int = 0
    expected_tokens: float = 0.0
    expected_seconds: float = 0.0

    @property
    def rounds(self) -> int:
        return sum(self.rounds_by_k.values())

    def add(self, other: SourceStats) -> None:
        for k, rounds in other.rounds_by_k.items():
            self.rounds_by_k[k] = self.rounds_by_k.get(k, 0) + rounds
        self.drafted += other.drafted
        self.tokens += other.tokens
        self.expected_tokens += other.expected_tokens
        self.expected_seconds += other.expected_seconds


@dataclass
class DecodeStats:
    """Counters and seconds of one request, or of several added up.

    ``num_round_tokens`` are the output tokens that rounds emitted: all but the first, which comes from the prefill.
    ``num_spec_steps`` are rounds, those with nothing drafted included, ``num_drafts`` the others;
    ``acceptance_histogram[a]`` counts the rounds in which a draft tokens were accepted. ``num_cached_tokens`` are
    prompt tokens that were in the cache already. The draft model's own prefill is part of the first round: it is a cost
    of speculation. ``choose_seconds`` is time of rounds spent on choosing, for drafts too. ``sources`` says what a
    controller chose, by source of drafts; drafts that it did not have verified are in no other counter.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_round_tokens: int = 0
    num_spec_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    choose_seconds: float = 0.0
    draft_steps: int = 0
    sources: dict[str, SourceStats] = field(default_factory=dict)

    def prefill(self, seconds: float, cached: int) -> None:
        self.prefill_seconds += seconds
        self.num_cached_tokens = cached
        self.num_output_tokens = 1

    @contextmanager
    def round(self, target: Worker, drafter: Worker, chooser: Timed) -> Iterator[None]:
        start, verifying, drafting, steps = perf_counter(), target.seconds, drafter.seconds, drafter.passes
        choosing = chooser.seconds
        yield
        self.choose_seconds += chooser.seconds - choosing
        self.decode_seconds += perf_counter() - start
        self.target_seconds += target.seconds - verifying
        self.draft_seconds += drafter.seconds - drafting
        self.draft_steps += drafter.passes - steps
        self.num_spec_steps += 1

    def count(self, committed: int, proposed: int, accepted: int) -> None:
        self.num_output_tokens += committed
        self.num_round_tokens += committed
        self.num_drafts += proposed > 0
        self.num_draft_tokens += proposed
        self.num_accepted_draft_tokens += accepted
        self.acceptance_histogram += [0] * (accepted + 1 - len(self.acceptance_histogram))
        self.acceptance_histogram[accepted] += 1

    def chose(self, choice: Choice, proposed: int, committed: int) -> None:
        """A round of a controller's choosing, how many drafts were verified, and what it committed."""
        stats = self.sources.setdefault(choice.source or "plain", SourceStats())
        stats.rounds_by_k[proposed] = stats.rounds_by_k.get(proposed, 0) + 1
        stats.drafted += choice.drafted
        stats.tokens += committed
        stats.expected_tokens += choice.tokens
        stats.expected_seconds += choice.seconds

    def add(self, other: DecodeStats) -> None:
        """Sum another request's counters and seconds into these."""
        for name, value in vars(other).items():
            if isinstance(value, (int, float)):
                setattr(self, name, getattr(self, name) + value)
        for source, stats in other.sources.items():
            self.sources.setdefault(source, SourceStats()).add(stats)
        pairs = zip_longest(self.acceptance_histogram, other.acceptance_histogram, fillvalue=0)
        self.acceptance_histogram = [mine + theirs for mine, theirs in pairs]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per verify pass, correction or bonus token included; 1 for plain decoding."""
        return self.num_round_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """alpha: accepted / proposed draft tokens; 0 when nothing was drafted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of decoding, the prefill left out."""
        return self.num_round_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def host_microseconds_per_round(self) -> float:
        """Time of a round in which no engine ran."""
        host = self.decode_seconds - self.target_seconds - self.draft_seconds
        return 1e6 * host / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def choose_microseconds_per_round(self) -> float:
        """The chooser's part of them."""
        return 1e6 * self.choose_seconds / self.num_spec_steps if self.num_spec_steps else 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "tokens_per_second": self.tokens_per_second,
            "host_microseconds_per_round": self.host_microseconds_per_round,
            "choose_microseconds_per_round": self.choose_microseconds_per_round,
        }
