"""All drafters of one sequence, by name."""

from __future__ import annotations

from outrider.engines.errors import OutriderError
from outrider.engines.next_tokens import NextTokens
from outrider.runtime.controller import Controller
from outrider.runtime.drafters import Drafter, ModelSource, NoDrafter
from outrider.runtime.drafters.adaptive import AdaptiveDrafter, Lookups
from outrider.runtime.drafters.cascade import CascadeDrafter
from outrider.runtime.drafters.ngram import NgramDrafter
from outrider.runtime.stats import DecodeStats

DRAFTERS = ("model", "ngram", "cascade", "none")
WITH_MODEL = ("model", "cascade")


class Roster:
    """Args: ``model`` is None for a bundle without a draft model, ``next_tokens`` for one without a table."""

    def __init__(self, model: ModelSource | None, next_tokens: NextTokens | None) -> None:
        self.model = model
        self.lookups = Lookups(next_tokens)
        self.ngram = NgramDrafter(next_tokens)

    def drafter(self, name: str, model: ModelSource | None = None) -> Drafter:
        """The drafter called ``name`` (one of ``DRAFTERS``).

        Args:
            model: what drafts in place of the bundle's draft model.

        Raises:
            OutriderError: there is no such drafter, or this bundle has no draft model.
        """
        check_drafter(name, self.model is not None)
        if name == "none":
            return NoDrafter()
        if name == "ngram":
            return self.ngram
        model = model or self.model
        assert model is not None
        return model if name == "model" else CascadeDrafter(NgramDrafter(), model)

    def adaptive(
        self, name: str, controller: Controller, stats: DecodeStats, *, free: bool, model: ModelSource | None = None
    ) -> Drafter:
        """Has ``controller`` choose among what the drafter ``name`` may ask, and the table with ``cascade``.

        Args:
            free: see ``SourcesDrafter``.
            model: as for ``drafter``.
        """
        return AdaptiveDrafter(
            controller,
            self.lookups if name in ("ngram", "cascade") else None,
            (model or self.model) if name in WITH_MODEL else None,
            free=free,
            stats=stats,
        )


def check_drafter(name: str, has_model: bool) -> None:
    """Raises OutriderError: there is no such drafter, or it needs a draft model and the bundle has none."""
    if name not in DRAFTERS:
        raise OutriderError(f"unknown drafter {name!r}; choose one of {', '.join(DRAFTERS)}")
    if name in WITH_MODEL and not has_model:
        raise OutriderError("this bundle has no draft model; use --drafter ngram, or export with --draft PATH")
