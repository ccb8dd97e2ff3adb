"""Filters against those of transformers, and the chooser: which token a row gives, and with which log-probability."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import chi_square_p
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.runtime.choose import Chooser, TokenLogprobs
from outrider.runtime.sampling.filters import Distribution, filtered
from outrider.runtime.sampling.history import History
from outrider.runtime.sampling.noise import log_uniforms, stream_key
from outrider.runtime.sampling.options import SamplingOptions

torch = pytest.importorskip("torch")
warpers = pytest.importorskip("transformers.generation.logits_process")

Logits = NDArray[np.float32]

# Cumulative sums of float32 weights differ from transformers' by rounding. A token may be kept or dropped where a
# threshold moved by this much keeps or drops it too.
SLACK = 1e-6
# exp() of float32 is 0 below it: such a token is not drawn in 10**45 tokens, and is dropped.
UNDERFLOW = 1e-40


def shapes(vocab: int, seed: int) -> dict[str, Logits]:
    """Rows of the kinds that models give: flat, peaked, certain, masked, with much or little in the tail."""
    rng = np.random.default_rng(seed)
    rows = {
        "flat": rng.normal(0, 0.1, vocab),
        "usual": rng.normal(0, 2.5, vocab),
        "peaked": rng.normal(0, 8, vocab),
        "certain": rng.normal(0, 1, vocab) + 60 * (np.arange(vocab) == vocab // 2),
        "masked": np.where(rng.random(vocab) < 0.7, -np.inf, rng.normal(0, 2, vocab)),
        "long tail": -3 * np.log1p(rng.permutation(vocab)) + 0.01 * rng.normal(size=vocab),
    }
    for name, heads in (("light head", 0.0006), ("heavy head", 0.0021)):  # 40 and 70 % of the mass, from some vocab on
        head = rng.random(vocab) < heads
        rows[name] = np.where(head, 0, np.log(9e-4)) + 0.01 * rng.normal(size=vocab)
    rows["masked"][rng.integers(vocab)] = 1.0
    return {name: row.astype(np.float32) for name, row in rows.items()}


def distribution(logits: Logits, **options: Any) -> Distribution:
    """What a request with these options draws from."""
    return chooser(len(logits), **{"temperature": 1.0, **options}).distribution(logits)


def chooser(vocab: int, seed: int = 0, **options: Any) -> Chooser:
    return Chooser(SamplingOptions(**options), History([1, 2]), seed, vocab)


def warped(logits: Logits, slack: float, **options: Any) -> NDArray[np.float64]:
    """Probabilities by transformers' warpers in its own order, in float64; ``slack`` loosens each threshold."""
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    steps = []
    if options.get("temperature", 1.0) != 1:
        steps.append(warpers.TemperatureLogitsWarper(options["temperature"]))
    if options.get("top_k"):
        steps.append(warpers.TopKLogitsWarper(options["top_k"]))
    if options.get("top_p", 1) < 1:
        steps.append(warpers.TopPLogitsWarper(min(options["top_p"] + slack, 1)))
    if options.get("min_p"):
        steps.append(warpers.MinPLogitsWarper(options["min_p"] * (1 - slack)))
    if options.get("typical_p", 1) < 1:
        steps.append(warpers.TypicalLogitsWarper(options["typical_p"] + slack))
    for step in steps:
        scores = step(None, scores)
    return np.asarray(torch.softmax(scores, -1))[0]


FILTERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.5},
    "top-k 1": {"top_k": 1},
    "top-k 2": {"top_k": 2},
    "top-k 40": {"top_k": 40},
    "top-k 2000": {"top_k": 2000},
    "top-p .1": {"top_p": 0.1},
    "top-p .9": {"top_p": 0.9},
    "top-p .9999": {"top_p": 0.9999},
    "min-p .05": {"min_p": 0.05},
    "min-p .9": {"min_p": 0.9},
    "typical-p .2": {"typical_p": 0.2},
    "typical-p .95": {"typical_p": 0.95},
    "cold top-k top-p": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "hot top-p min-p": {"temperature": 1.5, "top_p": 0.95, "min_p": 0.02},
    "top-k typical-p": {"top_k": 30, "typical_p": 0.8},
    "min-p typical-p": {"min_p": 0.01, "typical_p": 0.9},
    "all": {"temperature": 1.3, "top_k": 60, "top_p": 0.97, "min_p": 0.01, "typical_p": 0.95},
}


def ids_of(names: dict[str, Any]) -> list[str]:
    return [name.replace(" ", "-") for name in names]


@pytest.mark.parametrize("options", FILTERS.values(), ids=ids_of(FILTERS))
@pytest.mark.parametrize("vocab", [3, 4, 17, 320, 5000, 50_000])
def test_filters_keep_what_transformers_keeps(vocab: int, options: dict[str, Any]) -> None:
    """The same ids (up to SLACK and UNDERFLOW), each with the same probability."""
    for name, logits in shapes(vocab, seed=vocab).items():
        found, exact = distribution(logits, **options), warped(logits, 0, **options)
        if found.ids.tolist() != np.flatnonzero(exact > UNDERFLOW).tolist():
            tight, loose = (warped(logits, slack, **options) for slack in (-SLACK, SLACK))
            assert set(np.flatnonzero(tight > UNDERFLOW)) <= set(found.ids), name
            assert set(found.ids) <= set(np.flatnonzero(loose)), name
        dense = np.zeros(vocab)
        dense[found.ids] = found.probabilities
        assert np.abs(dense - exact).max() < 1e-6, name


@given(row=st.lists(st.floats(-30, 30, width=32) | st.just(-np.inf), min_size=1, max_size=40), data=st.data())
def test_a_distribution_is_one(row: list[float], data: st.DataObject) -> None:
    """Rising ids, positive weights, the best token always among them, whatever the options."""
    logits = np.array(row, np.float32)
    logits[data.draw(st.integers(0, len(row) - 1))] = np.float32(data.draw(st.floats(-30, 30, width=32)))
    options = {
        "temperature": data.draw(st.floats(1e-5, 100)),
        "top_k": data.draw(st.integers(0, 50)),
        "top_p": data.draw(st.floats(0, 1, exclude_min=True)),
        "min_p": data.draw(st.floats(0, 1)),
    }
    found = distribution(logits, **options)
    assert logits.argmax() in found.ids
    assert found.weights.min() > 0
    assert np.isfinite(found.weights).all()
    assert (np.diff(found.ids) > 0).all()
    assert np.isfinite(logits[found.ids]).all()
    assert found.probabilities.sum() == pytest.approx(1)
    assert len(distribution(logits, typical_p=options["top_p"], **options).ids) >= 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.sets(st.integers(0, 30), min_size=1, max_size=12))
def test_probabilities_by_token(weights: list[int], ids: set[int]) -> None:
    """One by one and for many ids: that of the weight, and 0 for a token that is not there."""
    kept = sorted(ids)[: len(weights)]
    law = Distribution(np.array(kept), np.array(weights[: len(kept)], float))
    expected = dict(zip(kept, np.array(weights[: len(kept)]) / sum(weights[: len(kept)]), strict=True))
    everything = np.arange(32)
    assert [law.probability(token) for token in everything] == pytest.approx([expected.get(i, 0) for i in everything])
    for asked in (everything, law.ids, everything[::3], np.array([31])):
        assert law.probabilities_of(asked).tolist() == pytest.approx([expected.get(i, 0) for i in asked])


TIES = np.array([2, 0, 2, 1, 2, 1, -np.inf, -5], np.float32)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, [0, 2, 4]),
        ({"top_k": 2}, [0, 2, 4]),
        ({"top_k": 4}, [0, 2, 3, 4, 5]),
        ({"top_p": 0.01}, [0, 2, 4]),
        ({"top_p": 0.5}, [0, 2, 4]),
        ({"top_p": 0.82}, [0, 2, 3, 4, 5]),
        ({"min_p": 1.0}, [0, 2, 4]),
        ({"typical_p": 0.01}, [0, 2, 4]),
        ({"top_k": 4, "top_p": 0.7}, [0, 2, 4]),
    ],
    ids=str,
)
def test_tokens_tied_with_the_last_that_stays_stay(options: dict[str, Any], kept: list[int]) -> None:
    """Equal logits are equally likely: which of them stay must not hang on the order of ids."""
    for turn in range(len(TIES)):
        expected = sorted((token + turn) % len(TIES) for token in kept)
        assert distribution(np.roll(TIES, turn), **options).ids.tolist() == expected


@pytest.mark.parametrize(
    "nothing",
    [{"top_p": 1.0}, {"min_p": 0.0}, {"typical_p": 1.0}, {"top_k": 0}, {"top_k": 320}, {"top_k": 10**6}],
    ids=str,
)
def test_a_filter_that_filters_nothing_changes_nothing(nothing: dict[str, Any]) -> None:
    for logits in shapes(320, seed=1).values():
        assert_equal_bits(distribution(logits, **nothing), distribution(logits))


def test_one_token_is_left_where_the_filters_are_hardest() -> None:
    for logits in shapes(320, seed=2).values():
        for hard in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
            assert distribution(logits, **hard).ids.tolist() == [logits.argmax()]
        assert len(distribution(logits, typical_p=1e-9).ids) == 1


def test_infinitely_hot_is_uniform_over_what_is_allowed() -> None:
    """The hottest temperature there is: still no masked token is drawn."""
    logits = shapes(17, seed=3)["masked"]
    for temperature in (1e30, 1e300):
        found = distribution(logits, temperature=temperature)
        assert found.ids.tolist() == np.flatnonzero(np.isfinite(logits)).tolist()
        assert found.probabilities == pytest.approx(1 / len(found.ids))


def test_the_lowest_number_masks_as_well_as_minus_infinity() -> None:
    """Many a processor masks with it, and a division by the temperature leaves float32: without a word to stderr."""
    logits = shapes(320, seed=3)["masked"]
    lowest = np.where(np.isfinite(logits), logits, np.finfo(np.float32).min)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = distribution(logits, temperature=0.5, processors=[lambda tokens, logits: lowest])
    assert_equal_bits(found, distribution(logits, temperature=0.5))


# Where a row lies.


def assert_equal_bits(one: Distribution, other: Distribution) -> None:
    assert one.ids.tolist() == other.ids.tolist()
    assert one.weights.tobytes() == other.weights.tobytes()


def moved(logits: Logits, offset: int) -> Logits:
    """An equal row that begins ``offset`` numbers into another array."""
    memory = np.full(offset + len(logits) + 3, 9, np.float32)
    memory[offset : offset + len(logits)] = logits
    return memory[offset : offset + len(logits)]


@settings(deadline=None)
@given(
    vocab=st.integers(3, 3000),
    seed=st.integers(0, 2**32 - 1),
    offset=st.integers(1, 33),
    options=st.sampled_from(list(FILTERS.values())),
)
def test_the_result_does_not_depend_on_where_a_row_lies(
    vocab: int, seed: int, offset: int, options: dict[str, Any]
) -> None:
    """Vector instructions take other paths at odd addresses; weights and log-probabilities keep their bits."""
    for logits in shapes(vocab, seed).values():
        elsewhere = moved(logits, offset)
        assert_equal_bits(distribution(elsewhere, **options), distribution(logits, **options))
        best = float(logits.max())
        assert_equal_bits(filtered(elsewhere, best, 0.9, top_p=0.9), filtered(logits, best, 0.9, top_p=0.9))
        for mode in ("raw", "processed"):
            log = chooser(vocab, logprobs=3, logprobs_mode=mode, **{"temperature": 1.0, **options}).logprobs
            token = int(logits.argmax())
            assert log(elsewhere, token) == log(logits, token)


def test_filters_read_only() -> None:
    """Rows are the engine's buffer, or a view into it."""
    for logits in shapes(320, seed=4).values():
        before = logits.tobytes()
        logits.setflags(write=False)
        for options in FILTERS.values():
            chooser(320, logprobs=2, **{"temperature": 1.0, **options}).choose(logits)
        assert logits.tobytes() == before


# The chooser.


@pytest.mark.parametrize("options", [{"temperature": None}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 20}])
def test_a_row_gives_the_same_token_whatever_other_rows_are_there(options: dict[str, Any]) -> None:
    """In any order, in passes of any number of rows, with other rows looked at in between."""
    rows = np.stack(list(shapes(320, seed=5).values()))
    alone = [chooser(320, seed=9, **options).choose(row) for row in rows]
    one = chooser(320, seed=9, **options)
    for count in (1, 2, 5, 6):
        for first in range(len(rows)):
            order = [(first + i) % len(rows) for i in range(count)]
            together = rows[order]
            assert [one.choose(row) for row in together] == [alone[i] for i in order]


def chosen(logits: Logits, seeds: int, **options: Any) -> NDArray[np.int64]:
    """How often each token is chosen over the seeds 0 to ``seeds - 1``."""
    one = chooser(len(logits), **options)
    counts = np.zeros(len(logits), np.int64)
    for seed in range(seeds):
        one.seed = seed
        counts[one.choose(logits)] += 1
    return counts


def test_tokens_are_chosen_by_the_law() -> None:
    """Of transformers' probabilities; a temperature a hundredth off would be found."""
    logits = np.random.default_rng(6).normal(0, 1.5, 12).astype(np.float32)
    options = {"temperature": 0.7, "top_p": 0.9}
    counts = chosen(logits, 200_000, **options)
    assert chi_square_p(counts, warped(logits, 0, **options) * 200_000) > 1e-4
    assert chi_square_p(counts, warped(logits, 0, temperature=0.68, top_p=0.9) * 200_000) < 1e-4


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 40, "bad_words_ids": [[0], [1]]}], ids=str)
@pytest.mark.parametrize("vocab", [3, 1000, 16_384, 16_385, 50_000])
def test_the_token_with_the_largest_score_is_chosen(vocab: int, options: dict[str, Any]) -> None:
    """log(u) / weight over all that is left, in a vocabulary of any size; u is the token id's, whoever else is left."""
    logits = shapes(vocab, seed=6)["flat"]
    law, one = distribution(logits, **options), chooser(vocab, **{"temperature": 1.0, **options})
    for seed in range(40):
        one.seed = seed
        scores = log_uniforms(stream_key(seed, len(one.history)), np.arange(vocab))[law.ids] / law.weights
        assert one.choose(logits) == law.ids[scores.argmax()]


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 9e-6, 1e-5, 1e-4])
def test_almost_no_temperature_is_greedy(temperature: float) -> None:
    for logits in shapes(320, seed=7).values():
        options = {"temperature": temperature}
        assert [chooser(320, seed, **options).choose(logits) for seed in range(5)] == [int(logits.argmax())] * 5


@pytest.mark.parametrize("temperature", [0, 1e-6, 9e-6])
def test_greedy_tells_the_closest_numbers_apart(temperature: float) -> None:
    """Where sampling at the least temperature would still take either."""
    logits = np.array([1, np.nextafter(np.float32(1), np.float32(2)), 1], np.float32)
    for seed in range(50):
        assert chooser(3, seed, temperature=temperature).choose(logits) == 1


def test_of_equally_good_tokens_greedy_takes_the_smallest_id() -> None:
    for turn in range(len(TIES)):
        logits = np.roll(TIES, turn)
        assert chooser(len(TIES)).choose(logits) == np.flatnonzero(logits == 2)[0]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}], ids=str)
@pytest.mark.parametrize(
    ("bad", "words"), [(np.nan, "hold nan"), (np.inf, "hold inf"), (-np.inf, "no token is allowed")], ids=str
)
@pytest.mark.parametrize("method", [Chooser.choose, Chooser.distribution], ids=lambda method: method.__name__)
def test_rows_that_are_no_logits_are_refused_in_a_line(
    method: Callable[[Chooser, Logits], Any], bad: float, words: str, options: dict[str, Any]
) -> None:
    """One NaN or infinity among good numbers, or nothing but -inf; the position is named."""
    logits = np.full(8, bad if bad == -np.inf else 1.0, np.float32)
    logits[5] = bad
    with pytest.raises(OutriderError, match=words) as refused:
        method(chooser(8, **options), logits)
    assert "\n" not in str(refused.value)
    assert "position 2" in str(refused.value)


# Log-probabilities.


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(torch.log_softmax(torch.from_numpy(logits.astype(np.float64)), -1))


def logged(logits: Logits, token: int, **options: Any) -> TokenLogprobs:
    found = chooser(len(logits), **options).logprobs(logits, token)
    assert found is not None
    return found


def assert_logged(found: TokenLogprobs, expected: NDArray[np.float64], token: int, count: int) -> None:
    """The token's own, and the ``count`` largest in order; a token that is not possible is not among them."""
    assert found.logprob == pytest.approx(expected[token], abs=1e-5)
    ids = [index for index, _ in found.top]
    assert [logprob for _, logprob in found.top] == pytest.approx(expected[ids], abs=1e-5)
    assert len(ids) == len(set(ids)) == count
    assert expected[ids] == pytest.approx(np.sort(expected)[::-1][:count], abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "top_k": 2}], ids=str)
@pytest.mark.parametrize("vocab", [3, 320, 50_000])
def test_raw_logprobs_are_those_of_the_model(vocab: int, options: dict[str, Any]) -> None:
    """Whatever the request draws from."""
    for logits in shapes(vocab, seed=8).values():
        for token in (0, vocab - 1, int(logits.argmax())):
            for count in {0, 1, min(20, vocab), min(vocab, 320)}:
                found, possible = logged(logits, token, logprobs=count, **options), int(np.isfinite(logits).sum())
                assert_logged(found, log_softmax(logits), token, min(count, possible))


@pytest.mark.parametrize("options", list(FILTERS.values())[:-1:3], ids=ids_of(FILTERS)[:-1:3])
def test_processed_logprobs_are_those_of_what_is_drawn_from(options: dict[str, Any]) -> None:
    """-inf for a token that cannot be drawn, which is not among the most likely ones."""
    for logits in shapes(320, seed=9).values():
        with np.errstate(divide="ignore"):
            expected = np.log(warped(logits, 0, **options))
        expected[expected < np.log(UNDERFLOW)] = -np.inf
        token, possible = int(logits.argmin()), int(np.isfinite(expected).sum())
        found = logged(logits, token, logprobs=10, logprobs_mode="processed", **{"temperature": 1.0, **options})
        assert_logged(found, expected, token, min(10, possible))


def test_processed_logprobs_of_greedy_are_those_behind_the_processors() -> None:
    logits = shapes(320, seed=10)["usual"]
    best, second = np.argsort(-logits)[:2].tolist()
    options = {"logit_bias": {second: 3.0}, "bad_words_ids": [[best]], "logprobs": 4}
    changed = logits.copy()
    changed[second] += 3
    changed[best] = -np.inf
    assert_logged(logged(logits, best, logprobs_mode="processed", **options), log_softmax(changed), best, 4)
    assert_logged(logged(logits, best, logprobs_mode="raw", **options), log_softmax(logits), best, 4)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_of_equally_likely_tokens_the_smallest_ids_come_first(mode: str) -> None:
    for temperature in (None, 1.0):
        found = logged(TIES, 7, logprobs=5, logprobs_mode=mode, temperature=temperature)
        assert [token for token, _ in found.top] == [0, 2, 4, 3, 5]
        first_two = logged(TIES, 7, logprobs=2, logprobs_mode=mode, temperature=temperature)
        assert [token for token, _ in first_two.top] == [0, 2]


def test_no_logprobs_unless_asked_for() -> None:
    logits = shapes(17, seed=11)["usual"]
    assert chooser(17).logprobs(logits, 0) is None
    assert logged(logits, 0, logprobs=0).top == ()
