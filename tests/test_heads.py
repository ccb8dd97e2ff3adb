"""The heads choose what the host's chooser chooses, and advance the state as the loop does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from outrider.engines.engine import NO_CUTOFF, HeadInputs
from outrider.engines.memory import HostMemory
from outrider.export.heads import with_heads
from outrider.runtime import OutriderError, SamplingOptions
from outrider.runtime.choose import Chooser
from outrider.runtime.resident import ResidentLaw
from outrider.runtime.sampling.history import History

VOCABULARY, SLOTS = 300, 12


@pytest.fixture(scope="module")
def heads() -> ort.InferenceSession:
    """The heads alone, behind logits that are an input."""
    value = helper.make_tensor_value_info
    inputs = [
        value("given", TensorProto.FLOAT, ["batch", "logit_rows", VOCABULARY]),
        value("input_ids", TensorProto.INT64, ["batch", "rows"]),
        value("cache_lengths", TensorProto.INT32, ["batch"]),
        value("logit_rows", TensorProto.INT64, ["batch", "logit_rows"]),
    ]
    outputs = [value("logits", TensorProto.FLOAT, ["batch", "logit_rows", VOCABULARY])]
    graph = helper.make_graph([helper.make_node("Identity", ["given"], ["logits"])], "logits", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    return ort.InferenceSession(with_heads(model, SLOTS).SerializeToString(), providers=["CPUExecutionProvider"])


def run(
    heads: ort.InferenceSession,
    logits: NDArray[np.float32],
    ids: Sequence[int],
    length: int = 0,
    first: int = 0,
    law: HeadInputs | None = None,
) -> dict[str, Any]:
    """All outputs for rows ``first``, ``first`` + 1, ... of one sequence."""
    law = law or HeadInputs(HostMemory(), VOCABULARY, SLOTS)
    inputs = {
        "given": logits[None],
        "input_ids": np.array([ids], np.int64),
        "cache_lengths": np.array([length], np.int32),
        "logit_rows": np.arange(first, first + len(logits))[None],
        **{name: buffer.read() for name, buffer in law.buffers.items()},
    }
    names = [output.name for output in heads.get_outputs()]
    return {name: value[0] for name, value in zip(names, heads.run(None, inputs), strict=True)}


def chooser_at(position: int, options: SamplingOptions, seed: int = 7) -> Chooser:
    return Chooser(options, History([1] * position, []), seed, VOCABULARY)


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 30.0])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("spread", [0.01, 3.0, 200.0])
def test_they_draw_as_the_host(heads: ort.InferenceSession, temperature: float, min_p: float, spread: float) -> None:
    """Of 300 rows nearly all are certain, and those are the host's own tokens."""
    options = SamplingOptions(temperature=temperature, min_p=min_p)
    law = HeadInputs(HostMemory(), VOCABULARY, SLOTS)
    rng = np.random.default_rng(3)
    certain = 0
    for start in range(5, 305, 5):
        logits = (spread * rng.standard_normal((5, VOCABULARY))).astype(np.float32)
        ResidentLaw(law, chooser_at(start, options)).prepare(start, start + 5)
        found = run(heads, logits, [1] * 5, start - 1, law=law)
        for row, (choice, near) in enumerate(zip(found["choices"], found["near"], strict=True)):
            if near == 1:
                certain += 1
                assert choice == chooser_at(start + row, options).choose(logits[row])
    assert certain > (290 if spread / temperature > 0.001 else 150)  # else most lie at the cutoff


@given(st.lists(st.integers(-3, 3), min_size=VOCABULARY, max_size=VOCABULARY))
@settings(max_examples=50, deadline=None)
def test_greedy_takes_the_smallest_of_equal_tokens(heads: ort.InferenceSession, values: list[int]) -> None:
    logits = np.array([values], np.float32)
    found = run(heads, logits, [1])
    assert found["choices"][0] == chooser_at(1, SamplingOptions()).choose(logits[0])
    assert found["near"][0] >= 0


def test_a_close_race_is_left_to_the_host(heads: ort.InferenceSession) -> None:
    """Where arithmetic in another order could change the winner, the head says so."""
    options = SamplingOptions(temperature=1.0)
    law = HeadInputs(HostMemory(), VOCABULARY, SLOTS)
    resident = ResidentLaw(law, chooser_at(4, options))
    resident.prepare(4, 5)
    logits = np.random.default_rng(0).standard_normal((1, VOCABULARY)).astype(np.float32)
    noise = law.noise.read()[0, 4]
    first, second = np.argsort(-(logits[0] + noise))[:2]
    for gap, near in ((1e-6, 0), (1e-3, 1)):
        close = logits.copy()
        close[0, second] = np.float32(close[0, first] + noise[first] - noise[second] - gap)
        found = run(heads, close, [1], 3, law=law)
        assert (found["near"][0] == 1) == near
        (row,) = resident.rows(found["choices"].tolist(), found["near"].tolist(), lambda index: close[index])  # noqa: B023
        assert chooser_at(4, options).choose(row) == chooser_at(4, options).choose(close[0])


def test_a_token_at_the_cutoff_is_left_to_the_host(heads: ort.InferenceSession) -> None:
    law = HeadInputs(HostMemory(), VOCABULARY, SLOTS)
    logits = np.full((1, VOCABULARY), -50, np.float32)
    logits[0, :2] = 0, -2
    law.set_noise(1, 1, lambda key: np.eye(1, VOCABULARY, 1, dtype=np.float32)[0] * 9)  # token 1 wins if it may
    for cutoff, choice, near in ((-2.01, 1, 1), (-2.00001, 1, 0), (-1.99999, 0, 0), (-1.99, 0, 1)):
        law.set_law(1, cutoff)
        found = run(heads, logits, [1], law=law)
        assert (found["choices"][0], found["near"][0] == 1) == (choice, near)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [slice(None), slice(17, 18), slice(299, 300)])
def test_logits_that_are_no_numbers_are_left_to_the_host(
    heads: ort.InferenceSession, value: float, where: slice
) -> None:
    """Whole rows of them, as a broken model gives, or one: the chosen id is in range, and the host has the row."""
    logits = np.tile(np.arange(VOCABULARY, dtype=np.float32), (2, 1))
    logits[0, where] = value
    found = run(heads, logits, [1, 1])
    assert found["near"].tolist() == [-1, 1]
    assert 0 <= found["choices"][0] < VOCABULARY
    law = ResidentLaw(HeadInputs(HostMemory(), VOCABULARY, SLOTS), chooser_at(1, SamplingOptions()))
    row, _ = law.rows(found["choices"].tolist(), found["near"].tolist(), lambda index: logits[index])
    if value == -np.inf and where != slice(None):
        assert chooser_at(1, SamplingOptions()).choose(row) == logits[0].argmax()  # a mask, to the host
    else:
        with pytest.raises(OutriderError, match=r"position 1|the logits"):
            chooser_at(1, SamplingOptions()).choose(row)


def test_an_interrupt_leaves_no_noise_behind() -> None:
    """In the middle of a write, before or after: what a slot holds is then unknown, and it is written anew."""
    heads = HeadInputs(HostMemory(), VOCABULARY, SLOTS)

    def ones(key: int) -> NDArray[np.float32]:
        return np.ones(VOCABULARY, np.float32)

    def interrupted(values: Any) -> None:
        honest(values)
        raise KeyboardInterrupt

    slot = heads._slots[3]
    honest = slot.write
    for act in (lambda: heads.set_noise(3, 5, ones), heads.clear_noise):
        slot.write = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            act()
        slot.write = honest  # type: ignore[method-assign]
        heads.set_noise(3, 5, ones)
        assert heads.noise.read()[0, 3].all()
    slot.write = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        heads.set_noise(3, 6, ones)
    slot.write = honest  # type: ignore[method-assign]
    heads.clear_noise()
    assert not heads.noise.read().any()


def one_hot(choices: Sequence[int]) -> NDArray[np.float32]:
    return np.eye(VOCABULARY, dtype=np.float32)[list(choices)]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_verdict_advances_as_the_loop_does(heads: ort.InferenceSession, k: int) -> None:
    """All drafts and choices over two tokens: accepted drafts and the target's own token behind them are committed."""
    for *drafts, last in product((5, 6), repeat=k + 1):
        for choices in product((5, 6), repeat=k + 1):
            found = run(heads, one_hot(choices), [last, *drafts], length=40)
            accepted = next((i for i, draft in enumerate(drafts) if draft != choices[i]), k)
            committed = [last, *choices[: accepted + 1]]
            assert found["tail"].tolist() == committed[-2:]
            assert found["next_lengths"] == 40 + len(committed) - 1
            assert found["tail_lengths"] == 40 + len(committed) - 2


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_draft_step_commits_its_last_row(heads: ort.InferenceSession, rows: int) -> None:
    found = run(heads, one_hot([9]), [9] * rows, length=3, first=rows - 1)
    assert found["tail"].tolist() == [9, 9] and found["choices"].tolist() == [9]
    assert found["next_lengths"] == 3 + rows


def test_rows_that_pad_a_verify_pass_are_never_accepted(heads: ort.InferenceSession) -> None:
    """Ids of padding are tokens like any other; the last row wanted stands for them."""
    inputs = HeadInputs(HostMemory(), VOCABULARY, SLOTS)
    feeds = {
        "given": one_hot([5, 0, 0, 0])[None],
        "input_ids": np.array([[4, 5, 0, 0]]),
        "cache_lengths": np.array([10], np.int32),
        "logit_rows": np.array([[0, 1, 1, 1]]),
        **{name: buffer.read() for name, buffer in inputs.buffers.items()},
    }
    tail, lengths = heads.run(["tail", "next_lengths"], feeds)
    assert tail.tolist() == [[5, 0]] and lengths.tolist() == [12]


def test_noise_stays_with_its_position() -> None:
    """A slot is written once for a position and seed, again for another, and zeroed for greedy."""
    heads = HeadInputs(HostMemory(), VOCABULARY, SLOTS)
    written: list[int] = []

    def noise(key: int) -> NDArray[np.float32]:
        written.append(key)
        return np.full(VOCABULARY, key, np.float32)

    for position, key in ((3, 5), (3, 5), (4, 6), (3 + SLOTS, 8), (3, 5)):
        heads.set_noise(position, key, noise)
    assert written == [5, 6, 8, 5]
    assert heads.noise.read()[0, [3, 4, 5], 0].tolist() == [5, 6, 0]
    heads.clear_noise()
    assert not heads.noise.read().any()
    assert heads.cutoff.read().item() == np.float32(NO_CUTOFF)
