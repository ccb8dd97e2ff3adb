"""A round that stays on its device: K draft steps and a verify pass, then one copy to the host.

Each step's token is the next step's input, and the verify pass's choices are the next round's state. The host waits in
one place, where it reads what became of the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engines.engine import PlanShape
from outrider.engines.errors import OutriderError
from outrider.engines.memory import Launch
from outrider.engines.plan import BoundEngine, BoundPlan, Verdicts


class RoundResult(NamedTuple):
    """``drafts`` are the K tokens drafted, ``choices`` and ``near`` the target's for each of its K + 1 rows."""

    drafts: list[int]
    choices: list[int]
    near: list[int]


class DeviceRound:
    """Rounds of K drafts over the caches of a target and a draft of batch 1 in the same memory, with the same heads.

    The state between rounds is the last two committed tokens and the lengths of both caches: the target's holds all
    tokens but the last, the draft's at least all but the last two. A round's first draft step takes both tokens, since
    the draft's cache lacks the first of them after a round in which every draft was accepted.

    Args:
        k: K.
        rows: of the verify pass: K + 1, or more where only a wider pass gives the right bits.

    Raises:
        OutriderError: the engines do not share memory and heads.
    """

    def __init__(self, target: BoundEngine, draft: BoundEngine, k: int, rows: int) -> None:
        if target.memory is not draft.memory or target.heads is None or target.heads is not draft.heads:
            raise OutriderError("a round on the device needs target and draft on one device, with the same heads")
        self.k = k
        memory = self._memory = target.memory
        self._tail = memory.buffer((1, 2), "int64")
        self._target_length = memory.buffer((1,), "int32")
        self._draft_length = memory.buffer((1,), "int32")
        ids, lengths, shape = self._tail, self._draft_length, PlanShape(2, 1)
        self._steps: list[BoundPlan] = []
        for _ in range(k):
            step = BoundPlan(draft, shape, shared={"input_ids": ids, "cache_lengths": lengths})
            step.want(shape.rows - 1)
            self._steps.append(step)
            ids, lengths, shape = step.buffers["choices"], step.buffers["next_lengths"], PlanShape(1, 1)
        self._verdicts = Verdicts(memory, 1, rows)
        self._verify = BoundPlan(
            target,
            PlanShape(rows, rows),
            shared={
                "input_ids": self._verdicts.ids,
                "cache_lengths": self._target_length,
                "choices": self._verdicts.choices,
                "near": self._verdicts.near,
                # Nothing of the verify pass reads these two, and the draft steps that did are over.
                "tail": self._tail,
                "tail_lengths": self._draft_length,
            },
        )
        # Rows behind the drafts are padding: the last row stands for them, so that none counts as accepted.
        self._verify.buffers["logit_rows"].write(np.minimum(np.arange(rows), k))
        capturable = target.capturable and draft.capturable
        self.launch: Launch = memory.recorded(self._run) if capturable else self._run

    def set_state(self, tail: Sequence[int], length: int) -> None:
        """What the next round goes on from, where the last one did not end there.

        Args:
            tail: the last two committed tokens.
            length: the number of committed tokens.
        """
        self._tail.write(tail)
        self._target_length.write(length - 1)
        self._draft_length.write(length - 2)

    def read(self) -> RoundResult:
        """What became of the launched round: the one place where the host waits."""
        ids, choices, near = self._verdicts.read()
        rows = self.k + 1
        return RoundResult(ids[0, 1:rows].tolist(), choices[0, :rows].tolist(), near[0, :rows].tolist())

    def logits(self, row: int) -> NDArray[np.float32]:
        """float32 ``[vocab_size]``: what a row chose from."""
        return self._verify.logits(row)

    def _run(self) -> None:
        copy, ids = self._memory.copy, self._verdicts.ids
        copy(self._tail, 1, ids, 0)
        for index, step in enumerate(self._steps):
            step.work()
            copy(step.buffers["choices"], 0, ids, index + 1)
        self._verify.work()
        copy(self._verify.buffers["next_lengths"], 0, self._target_length, 0)
