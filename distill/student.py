"""The draft to be: which tokens its head has, what it begins as, and its training."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.distill.batches import Batches
from outrider.distill.layers import layers_config, layers_spec, layers_tensors
from outrider.distill.model import DraftModel
from outrider.distill.options import DistillOptions
from outrider.distill.source import Source
from outrider.distill.tiny import tiny_config, tiny_tensors
from outrider.distill.train import Budget, Loss, Trainer, distillation_loss
from outrider.distill.writer import Written
from outrider.engines.errors import OutriderError
from outrider.export.architectures import family_spec
from outrider.export.layers import parse_layers
from outrider.export.spec import DecoderSpec

HEAD_TOKENS = 12288
_WIDTH, _LAYERS = 256, 3  # of a tiny draft
_ROW_LENGTH, _ROWS = 512, 8  # of a batch


@dataclass(frozen=True)
class Student:
    """``coverage`` is the share of the target's probability, in its own text, that the reduced head has rows for."""

    model: DraftModel
    config: dict[str, Any]
    coverage: float

    @property
    def parameters(self) -> int:
        return sum(values.size for values in self.model.tensors().values())


@dataclass(frozen=True)
class DraftPlan:
    """A draft before there is text: its Hugging Face ``config``, and what that is read as, the head still whole.

    ``layers`` are those of the target that it begins as; None for one from scratch.
    """

    source: Source
    config: dict[str, Any]
    spec: DecoderSpec
    layers: tuple[int, ...] | None


def plan_draft(source: Source, kind: str) -> DraftPlan:
    """Args:
        kind: ``tiny``, or layers of the target (``parse_layers``).

    Raises:
        OutriderError: layers that the target has not, or cannot give to a draft.
    """
    target = source.spec
    if kind == "tiny":
        config = tiny_config(_WIDTH, _LAYERS, target.vocab_size, target.max_positions)
        return DraftPlan(source, config, family_spec(config), None)
    layers = parse_layers(kind, target.num_layers, "--kind")
    config = layers_config(source.checkpoint.config, layers)
    return DraftPlan(source, config, layers_spec(config, target, layers), layers)


def new_student(plan: DraftPlan, training: Sequence[Written], seed: int, longest: int) -> Student:
    """Untrained.

    Args:
        longest: tokens of a sequence at most, the opening included.
    """
    source, embedding = plan.source, plan.source.embedding()
    draft_vocab, coverage = likeliest_tokens(training, len(embedding), HEAD_TOKENS)
    spec = replace(plan.spec, draft_vocab=draft_vocab)
    if plan.layers is None:
        tensors = tiny_tensors(spec, embedding, seed)
    else:
        tensors = layers_tensors(spec, source.spec, plan.layers, source.checkpoint)
    return Student(DraftModel(spec, tensors, embedding, row_length(longest)), plan.config, coverage)


def row_length(longest: int) -> int:
    """Of a batch, in tokens."""
    return max(_ROW_LENGTH, longest)


def new_trainer(
    student: Student,
    opening: Sequence[int],
    training: Sequence[Written],
    held_out: Sequence[Written],
    options: DistillOptions,
    budget: Budget,
    checkpoint: Path,
    loss: Loss = distillation_loss,
) -> Trainer:
    """Args:
        opening: tokens before each sequence.
        checkpoint, loss: see ``Trainer``.

    Raises:
        OutriderError: there is too little text, or what ``Trainer`` raises.
    """
    if not training or not held_out:
        raise OutriderError(
            f"{len(training) + len(held_out)} sequences of text are too few to train and to measure on; give more "
            "--minutes or --tokens"
        )
    spec = student.model.spec
    assert spec.draft_vocab is not None
    trained_on, measured_on = (
        Batches(part, opening, spec, row_length(options.max_length), _ROWS) for part in (training, held_out)
    )
    numbers = np.array([one.number for one in training])
    origin = {
        "kind": options.kind,
        "number of steps": str(options.steps),
        "seed": str(options.seed),
        "text": hashlib.sha256(numbers.tobytes() + spec.draft_vocab.tobytes()).hexdigest(),
        "loss": getattr(loss, "__name__", repr(loss)),
    }
    return Trainer(student.model, trained_on, measured_on, budget, options.seed, checkpoint, origin, loss)


def likeliest_tokens(written: Sequence[Written], vocab_size: int, count: int) -> tuple[NDArray[np.int64], float]:
    """The tokens that answers most likely have, int64 [count] rising, and their share of all probability."""
    mass = np.zeros(vocab_size)
    for one in written:
        likely, law = one.laws(max(one.answer - 1, 0))
        np.add.at(mass, likely.reshape(-1), law.reshape(-1))
    tokens = np.sort(np.argsort(-mass, kind="stable")[:count])
    return tokens, float(mass[tokens].sum() / mass.sum())
