"""OpenVINO GenAI's continuous batching, no server before it: clients in a closed loop, as those of ``serving/load.py``.

A request is ``prompts`` (token ids), ``clients`` and ``max_new_tokens``; the reply has for each of its ``answers`` the
seconds from the start until it was asked for, from there to its first token, from that to its last, and its tokens.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

from serve import Answer, answer

_CACHE_GB = 1


def load(config: dict[str, Any]) -> tuple[str, Answer]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GB
    scheduler.max_num_seqs = config["lanes"]
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": config["threads"]}
    if "draft" in config:
        properties["draft_model"] = openvino_genai.draft_model(config["draft"], "CPU", **properties)
    pipeline = openvino_genai.ContinuousBatchingPipeline(config["target"], scheduler, "CPU", properties)
    count = 0

    def reply(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal count
        generation = openvino_genai.GenerationConfig(
            max_new_tokens=request["max_new_tokens"], ignore_eos=True, do_sample=False, **config["generation"]
        )
        prompts, running, answers = list(request["prompts"]), [], []
        end = None  # when a client found nothing left to ask
        start, now = time.perf_counter(), 0.0
        while prompts or running:
            while prompts and len(running) < request["clients"]:
                ids = openvino.Tensor(np.array([prompts.pop(0)], np.int64))
                count += 1
                asked = time.perf_counter() - start
                running.append({"handle": pipeline.add_request(count, ids, generation), "asked": asked, "tokens": 0})
            if end is None and len(running) < request["clients"]:
                end = now
            pipeline.step()
            now = time.perf_counter() - start
            for one in list(running):
                while one["handle"].can_read():
                    (output,) = one["handle"].read().values()
                    one.setdefault("first", now)
                    one["tokens"] += len(output.generated_ids)
                if one["handle"].get_status() != openvino_genai.GenerationStatus.RUNNING:
                    running.remove(one)
                    answers.append([one["asked"], one["first"] - one["asked"], now - one["first"], one["tokens"]])
        return {"answers": answers, "end": now if end is None else end}

    return f"OpenVINO GenAI {openvino_genai.__version__}", reply


if __name__ == "__main__":
    answer(load)
