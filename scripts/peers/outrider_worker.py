"""Outrider itself, in the environment of ``bench_peers.py``."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from outrider.runtime import Pipeline, SamplingOptions
from serve import Decode, serve


def load(config: dict[str, Any]) -> tuple[str, Decode]:
    pipeline = Pipeline.load(config["bundle"], threads=config["threads"])

    def decode(ids: list[int], max_new_tokens: int, setting: dict[str, Any]) -> dict[str, Any]:
        pipeline.clear_caches()  # every run pays its own prefills
        request = pipeline.new_request(ids, SamplingOptions(max_new_tokens=max_new_tokens, ignore_eos=True))
        for _ in pipeline.decode(request, setting["drafter"], setting["k"], exact=setting.get("exact", True)):
            pass
        stats = request.stats
        return {
            "ids": list(request.output.tokens),
            "seconds": stats.decode_seconds,  # the draft model's prefill included
            "tokens": stats.num_round_tokens,
            "passes": stats.num_spec_steps,
            "proposed": stats.num_draft_tokens,
            "accepted": stats.num_accepted_draft_tokens,
        }

    return f"Outrider {version('outrider')}", decode


if __name__ == "__main__":
    serve(load)
