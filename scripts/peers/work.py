"""What peers need, each made once in the work folder: environments, plain checkpoints, their own exports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from make_checkpoint import copy_checkpoint, write_folder

from outrider.engines.errors import OutriderError
from outrider.export import ExportOptions, export_bundle
from outrider.export.architectures import decoder_spec, llama
from outrider.export.checkpoint import Checkpoint, open_checkpoint, read_all
from outrider.export.shared_embedding import SHARED, VOCABULARY, SharedEmbedding
from outrider.runtime import Pipeline
from outrider.runtime.tuning import tune, write_tuning

THREADS = 2
_HEAD = "lm_head.weight"


class Work:
    """The work folder of one pair. Everything in it is made under another name and renamed when it is whole.

    Raises:
        OutriderError: the folder was made for another pair.
    """

    def __init__(self, folder: Path, checkpoint: str, draft: str) -> None:
        self.folder = folder.resolve()
        self.checkpoint = checkpoint
        self.draft = draft
        pair = {"checkpoint": str(Path(checkpoint).resolve()), "draft": str(Path(draft).resolve())}
        note = self.folder / "pair.json"
        if not note.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps(pair))
        elif (before := json.loads(note.read_text())) != pair:
            raise OutriderError(f"{folder} holds exports of {before['checkpoint']} and {before['draft']}; give another")

    def once(self, name: str, make: Callable[[Path], object]) -> Path:
        path, part = self.folder / name, self.folder / f"{name}.part"
        if not path.exists():
            shutil.rmtree(part, ignore_errors=True)
            make(part)
            part.rename(path)
        return path

    def python(self, name: str, *requirements: str, without: str | None = None) -> Path:
        """The interpreter of a virtual environment with ``requirements``, which is run by ``-m`` only: it was moved.

        ``without`` is a package that comes with them and is taken away again.
        """

        def make(folder: Path) -> None:
            run(sys.executable, "-m", "venv", folder)
            pip = (folder / "bin" / "python", "-m", "pip")
            run(*pip, "install", "-q", *requirements)
            if without:
                run(*pip, "uninstall", "-q", "-y", without)

        return self.once(f"venv-{name}", make) / "bin" / "python"

    def plain_target(self) -> Path:
        """The target as a float32 Hugging Face folder."""
        return self.once("target", lambda folder: copy_checkpoint(open_checkpoint(self.checkpoint), folder))

    def plain_draft(self) -> Path:
        return self.once("draft", lambda folder: write_plain_draft(self.draft, self.checkpoint, folder))

    def bundle(self, precision: str) -> Path:
        """Outrider's own, tuned; of the float32 folder too, since peers cannot take over a quantized file's integers.

        The draft is in int8 beside any target.
        """
        options = ExportOptions(precision=precision, draft_precision="int8", tiers=(1, 2, 4, 8))
        source = str(self.plain_target())

        def make(folder: Path) -> None:
            export_bundle(source, self.draft, folder, options, threads=THREADS)
            pipeline = Pipeline.load(folder, threads=THREADS)
            write_tuning(pipeline, tune(pipeline))

        return self.once(f"outrider-{precision}", make)


def run(*command: object) -> None:
    """Raises OutriderError with the last line a command wrote when it fails."""
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode:
        lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
        raise OutriderError(f"{' '.join(str(part) for part in command[:4])}: {lines[-1] if lines else 'failed'}")


def write_plain_draft(draft: str, target: str, out: Path) -> None:
    """The draft as a Llama checkpoint that any program reads: an embedding of its own, a head of all tokens.

    No peer has reduced heads, so that theirs is larger than ours; a token outside the draft's vocabulary has a row of
    zeros, hence the logit 0, which is far below the logits that win.
    """
    of_target = open_checkpoint(target)
    source: Checkpoint = open_checkpoint(draft)
    if source.config.get(SHARED):
        source = SharedEmbedding(source, of_target, llama.decoder_spec(of_target.config).embedding)
    vocabulary = decoder_spec(source).draft_vocab
    config = {**source.config, "dtype": "float32", "architectures": ["LlamaForCausalLM"]}
    for name in ("draft_vocab_size", SHARED, VOCABULARY):
        config.pop(name, None)

    def tensors() -> Iterator[tuple[str, Any]]:
        for name, shape in llama.decoder_spec(config).expected_shapes():
            values = read_all(source, name)
            if name == _HEAD and vocabulary is not None:
                head = np.zeros(shape, np.float32)
                head[vocabulary] = values
                values = head
            yield name, values

    write_folder(out, config, of_target, tensors())
