"""Knowledge distillation: the draft learns the laws that the target had while it wrote (Hinton et al., 1503.02531)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.distill.batches import Batch, Batches
from outrider.distill.model import DraftModel
from outrider.distill.muon import Muon
from outrider.engines.errors import OutriderError
from outrider.export.shared_embedding import PROJECTION
from outrider.export.weights import written_whole

Loss = Callable[[Tensor, Batch], Tensor]  # of logits, float32 [N, head], and their labels

_CHECKPOINT_SECONDS = 60
_WARM_UP = 0.02  # of the training
_LOWEST_RATE = 0.02  # of the highest, at the end
_MATRIX_RATE, _RATE = 0.03, 4e-3  # the highest, of the layers' matrices and of all else
_WEIGHT_DECAY = 0.05
_LOOKS, _LOOKED_AT, _PATIENCE = 20, 64, 5  # looks at held-out text, its sequences, looks without a better one


@dataclass(frozen=True)
class Agreement:
    """On text that was not trained on: ``greedy`` is the share of positions where draft and target choose the same
    token greedily, ``overlap`` the mean of 1 - total variation: how often one drawn from the draft would stand.
    """

    greedy: float
    overlap: float


class Budget:
    """What of the training is done: by steps, or else by time."""

    def __init__(self, steps: int | None, seconds: float | None) -> None:
        self.steps, self.seconds = steps, seconds
        self.step = 0
        self.elapsed = 0.0
        self._since = time.monotonic()

    def go_on(self, step: int, elapsed: float) -> None:
        self.step, self.elapsed, self._since = step, elapsed, time.monotonic()

    def tick(self) -> None:
        now = time.monotonic()
        self.step, self.elapsed, self._since = self.step + 1, self.elapsed + now - self._since, now

    @property
    def done(self) -> float:
        """From 0 to 1."""
        if self.steps is not None:
            return min(1.0, self.step / self.steps)
        assert self.seconds is not None
        return min(1.0, self.elapsed / self.seconds)


class Trainer:
    """Trains in place. A step is one batch, whose place in the text depends on the seed and its number only.

    Training stops early where the draft agrees less and less with text that it is not trained on.

    Args:
        held_out: what ``agreement`` is measured on.
        checkpoint: file that training goes on from where it is there, and that is renewed every minute.
        origin: what the training depends on beside what is given here; a checkpoint of another one is refused.
        loss: of a step; see ``distillation_loss``.

    Raises:
        OutriderError: the checkpoint is damaged, or of another training.
    """

    def __init__(
        self,
        model: DraftModel,
        training: Batches,
        held_out: Batches,
        budget: Budget,
        seed: int,
        checkpoint: Path,
        origin: dict[str, str],
        loss: Loss,
    ) -> None:
        self.model = model
        self.budget = budget
        self._training = training
        self._held_out = held_out
        self._seed = seed
        self._checkpoint = checkpoint
        self._origin = origin
        self._loss = loss
        self._optimizers = _optimizers(model)
        self._found: list[float] = []  # greedy agreement, at each look
        if checkpoint.is_file():
            self._load()

    def train(self, progress: Callable[[float, float], None] = lambda done, loss: None) -> None:
        """``progress`` is called with the share that is done and the loss of the step."""
        saved = time.monotonic()
        for batch in self._steps():
            if self.budget.done >= 1 or self._worsens():
                break
            loss = self._step(batch)
            self.budget.tick()
            progress(self.budget.done, loss)
            if self.budget.done >= (len(self._found) + 1) / _LOOKS:
                self._found.append(self.agreement(_LOOKED_AT).greedy)
            if time.monotonic() - saved > _CHECKPOINT_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()

    @torch.no_grad()
    def agreement(self, sequences: int | None = None) -> Agreement:
        """On all that is held out, or the first so many sequences."""
        same = shared = count = 0.0
        for packed in self._held_out.packed(range(len(self._held_out))[:sequences]):
            batch = self._held_out.batch(packed)
            logits = self._logits(batch)
            same += float((logits.argmax(dim=-1) == batch.choices).sum())
            shared += float(overlap(logits, batch).sum())
            count += len(batch.choices)
        return Agreement(same / count, shared / count)

    def save(self) -> None:
        state = {
            "origin": self._origin,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "step": self.budget.step,
            "elapsed": self.budget.elapsed,
            "found": self._found,
        }
        with written_whole(self._checkpoint) as file:
            torch.save(state, file)

    def _load(self) -> None:
        path = self._checkpoint
        try:
            state: dict[str, Any] = torch.load(path, weights_only=True)
            origin = state["origin"]
        except Exception as error:  # PyTorch raises many types for files that are not its own
            raise OutriderError(f"{path} is damaged ({error!r:.80}); remove it: training begins anew") from None
        other = [name for name, value in self._origin.items() if origin.get(name) != value]
        if other:
            raise OutriderError(
                f"{path} is a training with another {other[0]}; give the same again, or remove it to begin anew"
            )
        self.model.load_state_dict(state["model"])
        for optimizer, held in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(held)
        self._found = state["found"]
        self.budget.go_on(state["step"], state["elapsed"])

    def _worsens(self) -> bool:
        """Whether the best look was some looks ago."""
        return len(self._found) - self._found.index(max(self._found)) > _PATIENCE if self._found else False

    def _steps(self) -> Iterator[Batch]:
        """From the step that is next, epoch after epoch, each in an order of its own."""
        skipped, epoch = self.budget.step, 0
        while True:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self._training))
            for packed in self._training.packed(order.tolist()):
                if skipped:
                    skipped -= 1
                else:
                    yield self._training.batch(packed)
            epoch += 1

    def _logits(self, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=_bfloat16_is_native()):
            hidden = self.model.hidden(batch.ids, batch.positions, batch.seen)
            logits = self.model.logits(hidden.flatten(0, 1)[batch.places])
        return logits.float()

    def _step(self, batch: Batch) -> float:
        rate = _rate(self.budget.done)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["highest"]
            optimizer.zero_grad()
        loss = self._loss(self._logits(batch), batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        return float(loss.detach())


@cache
def _bfloat16_is_native() -> bool:
    """Where the processor has no products for it (without AVX-512), it is emulated, fifty times as slow as float32."""
    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(there and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def distillation_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Cross entropy teaches from the first step on; total variation is what the acceptance rate is made of."""
    return cross_entropy(logits, batch) + total_variation(logits, batch)


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """From the target's law, mean over positions."""
    return -(batch.law * _log_law(logits, batch)).sum(dim=-1).mean()


def total_variation(logits: Tensor, batch: Batch) -> Tensor:
    """To the target's law, mean over positions: the share of drawn tokens that do not stand (Leviathan et al. 2023)."""
    return 1 - overlap(logits, batch).mean()


def overlap(logits: Tensor, batch: Batch) -> Tensor:
    """What the two laws have in common of each position, [N]: 1 - total variation, of what the target found likely."""
    return torch.minimum(_log_law(logits, batch).exp(), batch.law).sum(dim=-1)


def _log_law(logits: Tensor, batch: Batch) -> Tensor:
    """The draft's log-probabilities of what the target found likely, [N, k]."""
    return logits.gather(-1, batch.rows) - logits.logsumexp(dim=-1, keepdim=True)


def _rate(done: float) -> float:
    """Warm-up, then a cosine, as a share of the highest."""
    if done < _WARM_UP:
        return max(done, 1e-3) / _WARM_UP
    return _LOWEST_RATE + (1 - _LOWEST_RATE) * 0.5 * (1 + math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP)))


def _optimizers(model: DraftModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of layers; AdamW for head, projection, norms and biases."""
    ends = {f"{model.spec.head}.weight", PROJECTION, f"{model.spec.position_table}.weight"}
    matrices, tables, vectors = list[Tensor](), list[Tensor](), list[Tensor]()
    for name in model.names:
        parameter = model.tensor(name)
        assert parameter is not None
        (vectors if parameter.ndim < 2 else tables if name in ends else matrices).append(parameter)
    muon = Muon([{"params": matrices, "highest": _MATRIX_RATE}], lr=_MATRIX_RATE, weight_decay=_WEIGHT_DECAY)
    adam = torch.optim.AdamW(
        [
            {"params": tables, "weight_decay": _WEIGHT_DECAY, "highest": _RATE},
            {"params": vectors, "weight_decay": 0.0, "highest": _RATE},
        ],
        lr=_RATE,
        betas=(0.9, 0.95),
    )
    return [muon, adam]
