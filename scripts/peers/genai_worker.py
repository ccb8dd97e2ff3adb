"""onnxruntime-genai: a draft model beside the target (``model.draft`` of its config), or n-grams of the text so far.

Sources: docs/SpeculativeDecoding.md of microsoft/onnxruntime-genai. K is ``max_draft_tokens``; a positive
``min_adaptive_k`` lets its controller choose. The prefills of target and draft happen in ``append_tokens``: both are
left out.
"""

from __future__ import annotations

import time
from typing import Any

import onnxruntime_genai as og

from serve import Decode, serve


def load(config: dict[str, Any]) -> tuple[str, Decode]:
    target, pair = og.Model(config["target"]), og.Model(config["pair"])

    def decode(ids: list[int], max_new_tokens: int, setting: dict[str, Any]) -> dict[str, Any]:
        options = dict(setting)
        model = pair if options.pop("draft", False) else target
        params = og.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=len(ids) + max_new_tokens)
        if options:
            params.set_speculative_options(**options)
        generator = og.Generator(model, params)
        generator.append_tokens(ids)
        start = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        seconds = time.perf_counter() - start
        new = [int(token) for token in generator.get_sequence(0)][len(ids) :]
        reply = {"ids": new, "seconds": seconds, "tokens": len(new) - 1, "passes": len(new) - 1}
        if options:
            stats = generator.get_speculative_stats()
            reply |= {
                "passes": stats["target_forward_passes"] + stats["standard_fallback_steps"],
                "proposed": stats["draft_tokens_proposed"],
                "accepted": stats["draft_tokens_accepted"],
            }
        return reply

    return f"onnxruntime-genai {og.__version__}", decode


if __name__ == "__main__":
    serve(load)
