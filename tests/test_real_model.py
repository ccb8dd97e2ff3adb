"""SmolLM2-135M: a slice of `scripts/check_identity.py` and `scripts/check_transformers.py`, which run all prompts."""

from __future__ import annotations

from pathlib import Path

import checkpoints  # noqa: F401  puts scripts/ on the path
import pytest
from check_identity import compare, export_pairs
from check_transformers import first_difference, reference_model
from products import fewest_rows

from outrider.runtime import SamplingOptions
from outrider.runtime.bench import encode_prompt, read_prompts

PROMPTS = read_prompts(Path(__file__).parents[1] / "scripts" / "prompts.jsonl")


@pytest.mark.parametrize(("precision", "temperature"), [("int4", None), ("int4", 0.8), ("fp32", None)])
def test_speculative_text_is_plain_text(
    smollm2: Path, workdir: Path, precision: str, temperature: float | None
) -> None:
    """ids and logits of committed rows, n-gram, draft = target, draft = first layers."""
    pipelines = export_pairs(str(smollm2), workdir / "identity", precision)
    assert pipelines["self"].exactness == "bitwise"
    if precision == "int4":
        assert pipelines["self"].target.min_rows == fewest_rows("int4")
    options = SamplingOptions(max_new_tokens=16, temperature=temperature, seed=None if temperature is None else 7)
    seen = list(compare(pipelines, PROMPTS[12:30:9], options, tiers=(1, 4)))
    assert len(seen) == 6
    if temperature is None:
        assert any(stats.num_accepted_draft_tokens for name, _, stats in seen if name == "ngram")


def test_ids_equal_those_of_transformers(smollm2: Path, workdir: Path) -> None:
    pytest.importorskip("torch")
    pipeline = export_pairs(str(smollm2), workdir / "identity", "fp32")["self"]
    model = reference_model(smollm2)
    for prompt in PROMPTS[1::10]:
        ids = encode_prompt(pipeline, prompt)
        found = pipeline.generate([{"role": "user", "content": prompt.text}], max_new_tokens=24, k=4, drafter="ngram")
        difference = first_difference(model, ids, found.token_ids)
        assert difference is None or difference[1] < 1e-3
