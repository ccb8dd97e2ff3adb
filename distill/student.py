"""The draft to be: which tokens its head has, what it begins as, and its training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.distill.batches import Batches
from outrider.distill.layers import layers_config, layers_spec, layers_tensors
from outrider.distill.model import DraftModel
from outrider.distill.source import Source
from outrider.distill.tiny import tiny_config, tiny_spec, tiny_tensors
from outrider.distill.train import Budget, Trainer, TrainingRecipe
from outrider.distill.writer import Written
from outrider.engines.errors import OutriderError
from outrider.export.layers import parse_layers

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


def new_student(source: Source, written: Sequence[Written], kind: str, seed: int) -> Student:
    """Untrained.

    Args:
        kind: ``tiny``, or layers of the target (``parse_layers``).

    Raises:
        OutriderError: layers that the target has not, or cannot give to a draft.
    """
    embedding, target = source.embedding(), source.spec
    draft_vocab, coverage = likeliest_tokens(written, len(embedding), HEAD_TOKENS)
    if kind == "tiny":
        config = tiny_config(_WIDTH, _LAYERS, target.vocab_size, target.max_positions)
        spec = tiny_spec(config, draft_vocab)
        tensors = tiny_tensors(spec, embedding, seed)
    else:
        layers = parse_layers(kind, target.num_layers)
        config = layers_config(source.checkpoint.config, target, layers)
        spec = layers_spec(target, layers, draft_vocab)
        tensors = layers_tensors(spec, target, layers, source.checkpoint)
    return Student(DraftModel(spec, tensors, embedding, _ROW_LENGTH), config, coverage)


def new_trainer(
    student: Student,
    opening: Sequence[int],
    training: Sequence[Written],
    held_out: Sequence[Written],
    budget: Budget,
    seed: int,
    checkpoint: Path,
) -> Trainer:
    """Args:
    opening: tokens before each sequence.
    checkpoint: see ``Trainer``.

    Raises:
        OutriderError: there is too little text.
    """
    if not training or not held_out:
        raise OutriderError(
            f"{len(training) + len(held_out)} sequences of text are too few to train and to measure on; give more "
            "--minutes or --tokens"
        )
    draft_vocab = student.model.spec.draft_vocab
    assert draft_vocab is not None
    trained_on, measured_on = (Batches(part, opening, draft_vocab, _ROW_LENGTH, _ROWS) for part in (training, held_out))
    return Trainer(student.model, trained_on, measured_on, TrainingRecipe(), budget, seed, checkpoint)


def likeliest_tokens(written: Sequence[Written], vocab_size: int, count: int) -> tuple[NDArray[np.int64], float]:
    """The tokens that answers most likely have, int64 [count] rising, and their share of all probability."""
    mass = np.zeros(vocab_size)
    for one in written:
        first = max(one.answer - 1, 0)
        law = np.exp(one.top_logits[first:].astype(np.float32))
        law /= law.sum(axis=1, keepdims=True)
        np.add.at(mass, one.top_ids[first:].astype(np.int64).reshape(-1), law.reshape(-1))
    tokens = np.sort(np.argsort(-mass, kind="stable")[:count])
    return tokens, float(mass[tokens].sum() / mass.sum())
