"""A draft for any target, distilled from the target's own text. The only room that imports PyTorch."""

from outrider.distill.card import card_table
from outrider.distill.distill import distill as distill_draft
from outrider.distill.options import DistillOptions

__all__ = ["DistillOptions", "card_table", "distill_draft"]
