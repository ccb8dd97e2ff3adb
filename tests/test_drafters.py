"""Drafters: what they propose, and that a draft model's cache is always that of the committed text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from check_identity import in_step
from hypothesis import given
from hypothesis import strategies as st

from outrider.export import ExportOptions, export_bundle
from outrider.runtime import Pipeline, SamplingOptions
from outrider.runtime.drafters import ngram
from outrider.runtime.drafters.ngram import NgramDrafter

small_tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def looked_up(tokens: Sequence[int], k: int) -> list[int]:
    """The definition, by searching: the longest suffix that occurred before, latest occurrence, copied on and on."""
    for size in range(min(ngram.MAX_NGRAM, len(tokens)), ngram.MIN_NGRAM - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if list(tokens[start : start + size]) == list(tokens[-size:]):
                text = list(tokens)
                while len(text) < len(tokens) + k:
                    text.append(text[start + size + len(text) - len(tokens)])
                return text[len(tokens) :]
    return []


@given(tokens=small_tokens, cuts=st.lists(st.integers(1, 5), max_size=20), k=st.integers(1, 8))
def test_ngram_index_equals_a_search(tokens: list[int], cuts: list[int], k: int) -> None:
    """Grown in any steps, the index answers as a search over the whole text would."""
    drafter = NgramDrafter()
    drafter.begin()
    end = 1
    for step in cuts:
        assert drafter.look_up(tokens[:end], k) == looked_up(tokens[:end], k)
        end = min(len(tokens), end + step)
    assert drafter.look_up(tokens, k) == looked_up(tokens, k)


def test_ngram_prefers_the_longest_match_and_then_the_latest() -> None:
    drafter = NgramDrafter()
    assert drafter.look_up([1, 2, 3, 4, 9, 9, 3, 4, 5, 1, 2, 3, 4], 1) == [9]
    drafter.begin()
    assert drafter.look_up([3, 4, 5, 0, 3, 4, 6, 0, 3, 4], 1) == [6]


def test_ngram_goes_on_into_its_own_copy() -> None:
    assert NgramDrafter().look_up([7, 7, 7], 5) == [7] * 5
    assert NgramDrafter().look_up([1, 2, 1, 2, 1], 4) == [2, 1, 2, 1]


def test_ngram_forgets_the_last_request() -> None:
    drafter = NgramDrafter()
    assert drafter.look_up([1, 2, 3, 1, 2], 1) == [3]
    drafter.begin()
    assert drafter.look_up([1, 2], 1) == []


def test_ngram_work_does_not_grow_with_the_context() -> None:
    """A lookup reads at most one entry a match length, and a new token adds at most as many, at any length."""

    class Counting(dict[tuple[int, ...], int]):
        reads = writes = 0

        def get(self, *arguments: object) -> int | None:  # type: ignore[override]
            self.reads += 1
            return super().get(*arguments)  # type: ignore[call-overload, no-any-return]

        def __setitem__(self, key: tuple[int, ...], value: int) -> None:
            self.writes += 1
            super().__setitem__(key, value)

    sizes = ngram.MAX_NGRAM - ngram.MIN_NGRAM + 1
    tokens = [(i * i) % 1009 for i in range(30_000)]
    drafter = NgramDrafter()
    drafter.look_up(tokens, 4)
    counting = Counting(drafter._follower)
    drafter._follower = counting
    drafter.look_up([*tokens, 5], 4)
    assert counting.reads <= sizes
    assert counting.writes <= sizes


@pytest.fixture(scope="module", params=["int4", "fp32"])
def twins(request: pytest.FixtureRequest, tiny: Path, workdir: Path) -> Pipeline:
    """A pair whose draft is the target."""
    out = workdir / f"twins-{request.param}"
    options = ExportOptions(precision=request.param, tiers=(1, 2, 4, 8), max_length=96)
    export_bundle(str(tiny), str(tiny), out, options, threads=2)
    return in_step(Pipeline.load(out, threads=2))


@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_a_draft_that_is_the_target_is_always_accepted(twins: Pipeline, k: int) -> None:
    """Acceptance 1 in every round: after a fully accepted round the draft's cache gets its last token and the bonus."""
    result = twins.generate("the quick brown fox", k=k, drafter="model", max_new_tokens=50)
    assert result.stats.draft_acceptance_rate == 1.0
    rounds = result.stats.num_spec_steps
    assert result.stats.acceptance_histogram[k] >= rounds - 1
    assert result.stats.draft_steps <= k * rounds


def test_the_draft_forgets_the_last_request(twins: Pipeline) -> None:
    """The same prompt twice, another between: equal acceptance each time."""
    first = twins.generate("the quick brown fox", k=4, drafter="model", max_new_tokens=30)
    twins.generate("def add(a, b):", k=4, drafter="model", max_new_tokens=7)
    again = twins.generate("the quick brown fox", k=4, drafter="model", max_new_tokens=30)
    assert again.token_ids == first.token_ids
    assert again.stats.acceptance_histogram == first.stats.acceptance_histogram


def drafted(pipeline: Pipeline, tokens: Sequence[int], k: int, **options: Any) -> list[int]:
    """What the draft model proposes behind ``tokens``."""
    request = pipeline.new_request(tokens, SamplingOptions(**options))
    draw = partial(request.rule.draft, request.chooser)
    proposed = pipeline.drafter("model").propose(request.history, k, draw)
    assert request.history.tokens == list(tokens)
    return [draft.token for draft in proposed]


def test_the_draft_stops_behind_its_end_of_sequence(tiny_pipeline: Pipeline) -> None:
    """Nothing behind an end of sequence can stand, so nothing is drafted there."""
    ids = tiny_pipeline.codec.encode("the quick brown fox")
    tiny_pipeline.drafter("model").begin()
    free = drafted(tiny_pipeline, ids, 8)
    assert len(free) == 8
    end = free.index(free[2])
    assert drafted(tiny_pipeline, ids, 8, eos_token_id=free[2]) == free[: end + 1]
    assert drafted(tiny_pipeline, ids, 8, stop_token_ids=[free[2]]) == free[: end + 1]
    assert drafted(tiny_pipeline, ids, 8, eos_token_id=free[2], ignore_eos=True) == free


def test_drafters_may_take_turns(tiny_pipeline: Pipeline) -> None:
    """Rounds by another drafter in between: the draft model catches up with what it did not see."""
    tokens = tiny_pipeline.codec.encode("the quick brown fox jumps")
    tiny_pipeline.drafter("model").begin()
    drafted(tiny_pipeline, tokens, 4)
    grown = [*tokens, 11, 12, 13, 14, 15, 16, 17]
    late = drafted(tiny_pipeline, grown, 4)
    tiny_pipeline.clear_caches()
    tiny_pipeline.drafter("model").begin()
    assert drafted(tiny_pipeline, grown, 4) == late
