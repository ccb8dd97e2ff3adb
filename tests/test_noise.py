"""The noise behind every sampled token: the published generator, entered anywhere, the same whatever else is drawn."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import chi_square_p
from numpy.typing import NDArray

from outrider.runtime.choose import Chooser
from outrider.runtime.sampling.history import History
from outrider.runtime.sampling.noise import Stream, log_uniforms, raw_numbers, stream_key, uniform
from outrider.runtime.sampling.options import SamplingOptions

torch = pytest.importorskip("torch")

GAMMA, MIX_1, MIX_2, MASK = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 2**64 - 1
words = st.integers(0, MASK)
token_ids = st.integers(0, 2**31 - 1)

# Changing any of these changes the text of every seeded request there ever was.
# (seed, position, stream, round): (key, its numbers for the ids 0, 1 and 151935).
GOLDEN = {
    (0, 0, Stream.TARGET, 0): (
        11619761522075635141,
        [122662965390353415, 3640764157949842060, 7300672109021441840],
    ),
    (0, 1, Stream.TARGET, 0): (
        10414705469639538944,
        [11451964812683756120, 11397677566891124372, 2837190919463043081],
    ),
    (1, 0, Stream.TARGET, 0): (
        3226932592602901054,
        [8142116598109948372, 14884959352829712174, 2907516149770978528],
    ),
    (2024, 17, Stream.DRAFT, 3): (
        9562430229810099257,
        [6545229745784741867, 9843442875209727872, 4179457676083448545],
    ),
    (2024, 17, Stream.ACCEPT, 3): (
        12924027436596562166,
        [16571248876343565255, 6750190203316932218, 14105475671797649571],
    ),
    (MASK, 2**32, Stream.TARGET, 0): (
        6439086594164005558,
        [1545957378298459952, 6411443468621758060, 10101892365545684374],
    ),
}
GOLDEN_TEXT = [6, 6, 6, 6, 4, 2, 7, 3, 0, 6, 0, 3, 3, 6, 3, 6]


def independence_p(first: NDArray[np.float64], second: NDArray[np.float64], bins: int = 16) -> float:
    """Chi-square of the pairs (first[i], second[i]) over a square of bins, against the uniform law."""
    observed = np.histogram2d(first, second, bins, ((0, 1), (0, 1)))[0].astype(np.int64)
    return chi_square_p(observed, np.full((bins, bins), len(first) / bins**2))


def splitmix(key: int, index: int) -> int:
    """Output ``index`` of SplitMix64 from ``key``, in whole numbers."""
    state = (key + (index + 1) * GAMMA) & MASK
    state = (state ^ state >> 30) * MIX_1 & MASK
    state = (state ^ state >> 27) * MIX_2 & MASK
    return state ^ state >> 31


def key_of(number: int) -> int:
    """The key whose number 0 is ``number``: SplitMix64 backwards."""

    def unshift(value: int, shift: int) -> int:
        shifted = value
        for _ in range(64 // shift):
            shifted = value ^ shifted >> shift
        return shifted

    state = unshift(number, 31) * pow(MIX_2, -1, 2**64) & MASK
    state = unshift(state, 27) * pow(MIX_1, -1, 2**64) & MASK
    return (unshift(state, 30) - GAMMA) & MASK


def uniforms(key: int, count: int) -> NDArray[np.float64]:
    return np.exp(log_uniforms(key, np.arange(count)))


def seeded_text(seed: int) -> list[int]:
    """Sixteen tokens from eight logits that never change."""
    history = History([0])
    chooser = Chooser(SamplingOptions(temperature=1.0), history, seed, 8)
    logits = np.array([0.5, -1.0, 0.25, 1.5, 0.0, -0.5, 1.0, 0.75], np.float32)
    while history.output_length < 16:
        history.push(chooser.choose(logits))
    return history.tokens[1:]


def test_splitmix64_gives_the_published_numbers() -> None:
    numbers = raw_numbers(1234567, np.arange(5)).tolist()
    assert numbers == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(key=words, ids=st.lists(token_ids, max_size=70))
def test_numbers_equal_a_computation_in_whole_numbers(key: int, ids: list[int]) -> None:
    assert raw_numbers(key, np.array(ids, np.int64)).tolist() == [splitmix(key, index) for index in ids]


@given(key=words, chosen=st.lists(st.integers(0, 299), max_size=80), offset=st.integers(0, 17), step=st.integers(1, 3))
def test_a_number_does_not_depend_on_what_is_drawn_beside_it(
    key: int, chosen: list[int], offset: int, step: int
) -> None:
    """Any ids, in any order, at any place in memory: each gets the number it has in a draw over all ids."""
    everything = np.arange(300)
    raw, logs = raw_numbers(key, everything), log_uniforms(key, everything)
    memory = np.full(offset + step * len(chosen), -1, np.int64)
    ids = memory[offset::step]
    ids[:] = chosen
    assert np.array_equal(raw_numbers(key, ids), raw[chosen])
    assert np.array_equal(log_uniforms(key, ids).view(np.int64), logs[chosen].view(np.int64))
    assert ids.tolist() == chosen, "the ids are read only"


@given(key=words)
def test_one_uniform_is_that_of_index_zero(key: int) -> None:
    assert math.log(uniform(key)) == pytest.approx(log_uniforms(key, np.array([0]))[0], rel=1e-14, abs=1e-15)


@given(seed=words, position=st.integers(0, 2**40), stream=st.sampled_from(Stream), round_number=st.integers(0, 2**40))
def test_keys_are_blake2b_of_the_packed_numbers(seed: int, position: int, stream: Stream, round_number: int) -> None:
    packed = b"".join(number.to_bytes(8, "little") for number in (seed, position, int(stream), round_number))
    digest = hashlib.blake2b(packed, digest_size=8).digest()
    assert stream_key(seed, position, stream, round_number) == int.from_bytes(digest, "little")


@pytest.mark.parametrize("place", GOLDEN, ids=str)
def test_golden_keys_and_numbers(place: tuple[int, int, Stream, int]) -> None:
    """A change of the generator changes everybody's seeded text; it must not pass unnoticed."""
    key, numbers = GOLDEN[place]
    assert stream_key(*place) == key
    assert raw_numbers(key, np.array([0, 1, 151935])).tolist() == numbers


def test_golden_text() -> None:
    """The same, through to the tokens: how a number becomes a choice is part of what a seed means."""
    assert seeded_text(seed=2024) == GOLDEN_TEXT


def test_the_key_of_a_first_choice_is_the_default() -> None:
    assert stream_key(7, 11) == stream_key(7, 11, Stream.TARGET, 0)


def test_keys_differ_between_seeds_positions_streams_and_rounds() -> None:
    """Also where the same numbers stand in other places."""
    few = (0, 1, 2, 2**63, MASK)
    places = [(seed, position, stream, n) for seed in few for position in few for stream in Stream for n in few]
    keys = {stream_key(*place) for place in places}
    assert len(keys) == len(places)


@pytest.mark.parametrize("seed", [0, MASK])
def test_the_smallest_and_the_largest_seed_are_seeds_like_others(seed: int) -> None:
    numbers = uniforms(stream_key(seed, 0), 50_000)
    observed = np.histogram(numbers, 64, (0, 1))[0]
    assert chi_square_p(observed, np.full(64, len(numbers) / 64)) > 1e-4
    assert seeded_text(seed) != seeded_text(seed ^ 1)


@pytest.mark.parametrize("number", [0, 1, 2**11 - 1, 2**63, MASK - 2**11, MASK], ids=hex)
def test_uniforms_lie_strictly_between_zero_and_one(number: int) -> None:
    """At the ends of the generator's range too: log(0) would bar a token, log(1) would choose it at any weight."""
    key = key_of(number)
    assert raw_numbers(key, np.array([0])).tolist() == [number]
    log = log_uniforms(key, np.array([0]))[0]
    assert 0 < uniform(key) < 1
    assert -np.inf < log < 0
    assert log == pytest.approx(math.log(uniform(key)), rel=1e-14, abs=1e-15)


def test_numbers_are_uniform() -> None:
    numbers = uniforms(stream_key(1, 1), 1_000_000)
    observed = np.histogram(numbers, 1000, (0, 1))[0]
    assert chi_square_p(observed, np.full(1000, 1000.0)) > 1e-4


@pytest.mark.parametrize("apart", [1, 2, 64, 4096])
def test_numbers_of_neighbouring_ids_are_independent(apart: int) -> None:
    numbers = uniforms(stream_key(2, 1), 300_000)
    assert independence_p(numbers[:-apart], numbers[apart:]) > 1e-4


def neighbours(kind: str, count: int) -> list[Sequence[int]]:
    """Arguments of ``stream_key`` that differ by one in one place, from each to the next."""
    seeds = {"seed": range(count)}.get(kind, [5] * count)
    positions = {"position": range(count)}.get(kind, [9] * count)
    rounds = {"round": range(count)}.get(kind, [0] * count)
    return list(zip(seeds, positions, [Stream.DRAFT] * count, rounds, strict=True))


@pytest.mark.parametrize("kind", ["seed", "position", "round"])
def test_numbers_of_neighbouring_keys_are_independent(kind: str) -> None:
    """Of one id at positions (seeds, rounds) that follow one another, and of neighbouring ids across them."""
    ids = np.array([40, 41])
    numbers = np.array([np.exp(log_uniforms(stream_key(*place), ids)) for place in neighbours(kind, 40_000)])
    observed = np.histogram(numbers[:, 0], 64, (0, 1))[0]
    assert chi_square_p(observed, np.full(64, len(numbers) / 64)) > 1e-4
    assert independence_p(numbers[:-1, 0], numbers[1:, 0]) > 1e-4
    assert independence_p(numbers[:-1, 0], numbers[1:, 1]) > 1e-4


@pytest.mark.parametrize("streams", [(Stream.TARGET, Stream.DRAFT), (Stream.DRAFT, Stream.ACCEPT)])
def test_numbers_of_different_streams_are_independent(streams: tuple[Stream, Stream]) -> None:
    """The draft's draw tells nothing about the target's, nor about whether it will stand."""
    first, second = (np.array([uniform(stream_key(3, i, stream)) for i in range(40_000)]) for stream in streams)
    assert independence_p(first, second) > 1e-4


def test_the_chi_square_finds_a_fault() -> None:
    """What the tests above would say of a generator that repeats itself, or leans to one side."""
    numbers = uniforms(stream_key(4, 1), 40_000)
    assert independence_p(numbers, numbers) < 1e-9
    assert independence_p(numbers[:-1], (numbers[:-1] + 0.1 * numbers[1:]) % 1) < 1e-9
    assert chi_square_p(np.histogram(numbers**1.05, 64, (0, 1))[0], np.full(64, 625.0)) < 1e-9
    assert chi_square_p(np.array([99, 1]), np.array([100.0, 0.0])) == 0
