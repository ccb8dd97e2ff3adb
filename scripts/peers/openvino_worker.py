"""OpenVINO GenAI: a draft model, or prompt lookup (n-grams of the prompt only), on its paged attention backend.

Sources: the speculative decoding page and the samples of openvinotoolkit/openvino.genai. K is ``num_assistant_tokens``;
with ``assistant_confidence_threshold`` the draft stops where it is unsure. Its first pass gives one token in each mode.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import openvino_genai

from serve import Decode, serve


def load(config: dict[str, Any]) -> tuple[str, Decode]:
    properties = {"INFERENCE_NUM_THREADS": config["threads"], **config["properties"]}
    draft = openvino_genai.draft_model(config["draft"], "CPU", **properties)
    modes: dict[str, dict[str, Any]] = {
        "plain": {},
        "lookup": {"prompt_lookup": True},
        "draft": {"draft_model": draft},
    }
    pipelines = {
        mode: openvino_genai.LLMPipeline(config["target"], "CPU", **more, **properties) for mode, more in modes.items()
    }

    def decode(ids: list[int], max_new_tokens: int, setting: dict[str, Any]) -> dict[str, Any]:
        options = {name: value for name, value in setting.items() if name != "mode"}
        generation = openvino_genai.GenerationConfig(
            max_new_tokens=max_new_tokens, ignore_eos=True, do_sample=False, **options
        )
        prompt = np.array([ids], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(prompt), openvino.Tensor(np.ones_like(prompt)))
        result = pipelines[setting["mode"]].generate(inputs, generation)
        metrics, of_pair = result.perf_metrics, result.extended_perf_metrics
        new, sizes = [int(token) for token in result.tokens[0]], metrics.raw_metrics.m_batch_sizes
        reply = {
            "ids": new,
            "seconds": (metrics.get_generate_duration().mean - metrics.get_ttft().mean) / 1e3,
            "tokens": len(new) - sizes[0],
            "passes": len(sizes) - 1,
        }
        if setting["mode"] == "draft":
            reply["proposed"] = of_pair.draft_model_metrics.get_num_generated_tokens()
            reply["accepted"] = of_pair.get_num_accepted_tokens()
        return reply

    return f"OpenVINO GenAI {openvino_genai.__version__}", decode


if __name__ == "__main__":
    serve(load)
