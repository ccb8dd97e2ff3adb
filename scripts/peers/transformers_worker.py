"""transformers on PyTorch, float32: assisted generation with a draft model, or prompt lookup.

K is ``num_assistant_tokens`` on the constant schedule; "dynamic" is what its defaults do (up to 20, until the draft is
unsure). Tokens of the first pass are the prefill's and left out.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from serve import Decode, serve


class Passes(BaseStreamer):
    """Notes when a pass of the target gave how many tokens; the first entry is the prompt."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        pass


def load(config: dict[str, Any]) -> tuple[str, Decode]:
    torch.set_num_threads(config["threads"])
    models = {}
    for role in ("target", "draft"):
        models[role] = AutoModelForCausalLM.from_pretrained(config[role], dtype=torch.float32).eval()
        models[role].generation_config.eos_token_id = None
    defaults = dict(models["draft"].generation_config.to_dict())

    def decode(ids: list[int], max_new_tokens: int, setting: dict[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if setting["mode"] == "draft":
            options["assistant_model"] = models["draft"]
            for name in ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"):
                setattr(models["draft"].generation_config, name, setting.get(name, defaults[name]))
        elif setting["mode"] == "lookup":
            options["prompt_lookup_num_tokens"] = setting["num_assistant_tokens"]
        passes, prompt = Passes(), torch.tensor([ids])
        with torch.inference_mode():
            found = models["target"].generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                pad_token_id=0,
                streamer=passes,
                **options,
            )
        (first, of_prefill), *rest = passes.seen[1:]
        if not rest:
            raise RuntimeError("the first pass gave all tokens; ask for more")
        new = found[0, len(ids) :].tolist()
        return {
            "ids": new,
            "seconds": rest[-1][0] - first,
            "tokens": len(new) - of_prefill,
            "passes": len(rest),
        }

    return f"transformers {transformers.__version__}, PyTorch {torch.__version__}", decode


if __name__ == "__main__":
    serve(load)
