"""Small checkpoints for tests: random weights in the shapes that matter, with a tokenizer of a few hundred tokens."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.export.checkpoint import TokenizerFiles

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from make_checkpoint import llama_config, random_checkpoint

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
TEXT = [
    "the quick brown fox jumps over the lazy dog and the dog does not mind at all",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n",
    "one two three four five six seven eight nine ten eleven twelve",
]


@cache
def tiny_tokenizer(vocab_size: int = 320) -> TokenizerFiles:
    """A byte-level BPE trained on ``TEXT``; id 0 ends the sequence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return TokenizerFiles(tokenizer.to_str(), CHAT_TEMPLATE, {"eos_token": SPECIAL[0]}, (0,))


class TokenizerSource:
    """Stands for the checkpoint whose tokenizer a random checkpoint gets."""

    def __init__(self, files: TokenizerFiles) -> None:
        self.files = files

    def tokenizer(self) -> TokenizerFiles:
        return self.files


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Two layers, grouped-query attention, tied head; sizes that the block-quantized operators take."""
    shape = {"hidden": 64, "intermediate": 96, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 320}
    names = {key: changes.pop(key) for key in list(changes) if key in shape}
    return llama_config(**{**shape, **names}, **changes)


def write_tiny(
    path: Path, *, seed: int = 0, biases: bool = False, files: TokenizerFiles | None = None, **changes: Any
) -> Path:
    """A float32 checkpoint folder of ``tiny_config(**changes)``."""
    source = TokenizerSource(files or tiny_tokenizer())
    random_checkpoint(path, tiny_config(**changes), source, seed=seed, dtype=np.float32, biases=biases)
    return path
