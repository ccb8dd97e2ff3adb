"""Bad checkpoints, options and folders at export: one line that names the fault, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_tiny
from refusals import Change, cut, edit, refused, refused_by_cli, remove, write
from safetensors.numpy import load_file, save_file

from outrider.export import ExportOptions, check, export_bundle

SMALL: dict[str, Any] = {"tiers": (1, 2, 4, 8), "max_length": 96}
INDEX, SHARD, SINGLE = "model.safetensors.index.json", "model-00001.safetensors", "model.safetensors"


def config(**changes: Any) -> Change:
    return edit("config.json", lambda content: content.update(changes))


def tensors(change: Callable[[dict[str, Any]], Any]) -> Change:
    def damage(folder: Path) -> None:
        content = load_file(folder / SHARD)
        change(content)
        save_file(content, folder / SINGLE)
        remove(INDEX, SHARD)(folder)

    return damage


def refused_export(source: Path, out: Path, draft: Path | None = None, **options: Any) -> str:
    """Refused by the library and by the command alike, and the folder around ``out`` is as before."""
    before = sorted(out.parent.rglob("*"))
    given = {**SMALL, **options}
    draft_name = str(draft) if draft else None
    message = refused(lambda: export_bundle(str(source), draft_name, out, ExportOptions(**given), threads=2))
    args = ["--target", source, "--draft", draft or "none", "--out", out, "--k", ",".join(map(str, given.pop("tiers")))]
    args += [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    assert refused_by_cli("export", *args) == message
    assert sorted(out.parent.rglob("*")) == before
    return message


def second_shard(folder: Path) -> None:
    """All tensors once more in another file, which the index names for one of them."""
    shutil.copy(folder / SHARD, folder / "model-00002.safetensors")
    edit(INDEX, lambda index: index["weight_map"].update({Q0: "model-00002.safetensors"}))(folder)


def fill(name: str, value: float) -> Change:
    def change(content: dict[str, Any]) -> None:
        content[name].reshape(-1)[-1] = value

    return tensors(change)


Q0 = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
CHECKPOINTS: dict[str, tuple[Change, list[str]]] = {
    "nothing there": (lambda folder: folder / "nowhere", ["{source}/nowhere does not exist", "hub id"]),
    "a name that is too long": (lambda folder: folder / ("x" * 300), ["File name too long"]),
    "another kind of file": (
        lambda folder: folder / "config.json",
        ["{source}/config.json is not a checkpoint", ".gguf"],
    ),
    "no config": (remove("config.json"), ["{source} has no config.json"]),
    "config no JSON": (write("config.json", "{"), ["{source}/config.json", "JSON"]),
    "config no object": (write("config.json", "[]"), ["{source}/config.json", "object"]),
    "config no text": (write("config.json", b"\xff\xfe"), ["{source}/config.json"]),
    "no weights": (remove(INDEX, SHARD), ["{source}", SINGLE]),
    "shard missing": (remove(SHARD), ["{source}/" + SHARD, "missing"]),
    "index no map": (write(INDEX, '{"weight_map": ["a"]}'), ["{source}/" + INDEX, "weight_map"]),
    "index names more": (edit(INDEX, lambda index: index["weight_map"].update(more=SHARD)), [SHARD, "no tensor more"]),
    "shard empty": (cut(SHARD, lambda size: 0), ["{source}/" + SHARD, "cut short"]),
    "shard of 4 bytes": (cut(SHARD, lambda size: 4), ["{source}/" + SHARD, "cut short"]),
    "shard cut in the header": (cut(SHARD, lambda size: 500), ["{source}/" + SHARD, "cut short"]),
    "shard cut in the data": (cut(SHARD, lambda size: size // 2), ["{source}/" + SHARD, "cut short"]),
    "shard without its last byte": (cut(SHARD, lambda size: size - 1), ["{source}/" + SHARD, "cut short"]),
    "shard of noise": (write(SHARD, bytes(range(256)) * 20), ["{source}/" + SHARD, "damaged"]),
    "GGUF of noise": (lambda folder: write("x.gguf", bytes(range(256)) * 20)(folder) or folder / "x.gguf", ["x.gguf"]),
    "GGUF empty": (lambda folder: write("x.gguf", "")(folder) or folder / "x.gguf", ["x.gguf"]),
    "architecture": (config(model_type="mamba"), ["{source}", "'mamba'", "llama", "mistral"]),
    "architecture no name": (config(model_type=["llama"]), ["{source}", "not supported"]),
    "rope scaling": (config(rope_scaling={"rope_type": "axial"}), ["{source}", "'axial'", "llama3"]),
    "rope scaling without factor": (config(rope_scaling={"rope_type": "llama3"}), ["{source}", "factor"]),
    "activation": (config(hidden_act="relu2"), ["{source}", "'relu2'", "silu"]),
    "sliding window": (config(sliding_window=4096), ["{source}", "sliding_window 4096"]),
    "key missing": (
        edit("config.json", lambda content: content.pop("hidden_size") and None),
        ["{source}", "hidden_size"],
    ),
    "text for a number": (config(vocab_size="320"), ["{source}", "vocab_size", "'320'"]),
    "text for an angle": (config(rope_theta="x"), ["{source}", "config"]),
    "no layers": (config(num_hidden_layers=0), ["{source}", "num_layers is 0"]),
    "no heads": (config(num_attention_heads=0, head_dim=None), ["{source}", "config"]),
    "heads that do not divide": (config(num_key_value_heads=3), ["{source}", "4 heads", "3 key-value heads"]),
    "odd heads": (config(head_dim=15), ["{source}", "head_dim is 15"]),
    "tensor missing": (tensors(lambda content: content.pop(Q0)), ["{source}", f"no tensor {Q0}"]),
    "tensor misshapen": (
        tensors(lambda content: content.update({Q0: content[Q0][:48].copy()})),
        ["{source}", Q0, "[48, 64]", "[64, 64]"],
    ),
    "tensor that no llama has": (
        tensors(lambda content: content.update({Q0.replace("q_proj", "q_norm"): content[Q0][0].copy()})),
        ["{source}", "layers.0.self_attn.q_norm.weight", "no llama model"],
    ),
    "more layers than the config says": (config(num_hidden_layers=1), ["{source}", "model.layers.1.", "no llama"]),
    "a tied head that is none": (
        tensors(lambda content: content.update({"lm_head.weight": 2 * content[EMBEDDING]})),
        ["{source}", "lm_head.weight", "tie_word_embeddings"],
    ),
    "tensor not a number": (fill(Q0, float("nan")), ["{source}", Q0, "not finite"]),
    "tensor infinite": (fill(EMBEDDING, float("-inf")), ["{source}", EMBEDDING, "not finite"]),
    "norm not a number": (fill("model.norm.weight", float("nan")), ["{source}", "model.norm.weight", "not finite"]),
    "tensor in two files": (second_shard, ["{source}/model-00002.safetensors", "and so has another file"]),
    "vision part": (config(model_type="gemma3", vision_config={}), ["{source}", "'gemma3'", "vision_config"]),
    "encoder": (config(model_type="t5", is_encoder_decoder=True), ["{source}", "'t5'", "encoder"]),
    "code of its own": (config(model_type="own", auto_map={"AutoModel": "x.y"}), ["{source}", "'own'", "never run"]),
    "recurrent": (config(model_type="mamba2", state_size=128), ["{source}", "state_size", "rolled back"]),
    "recurrent layers": (
        config(model_type="qwen3", layer_types=["linear_attention", "full_attention"]),
        ["{source}", "linear_attention", "rolled back"],
    ),
    "a setting of another family": (config(logits_scaling=8.0), ["{source}", "logits_scaling 8.0"]),
    "experts": (config(num_local_experts=8), ["{source}", "num_local_experts 8"]),
    "no tokenizer": (remove("tokenizer.json"), ["{source} has no tokenizer.json"]),
    "tokenizer no JSON": (write("tokenizer.json", "{"), ["{source}", "tokenizer.json"]),
    "tokenizer no text": (write("tokenizer.json", b"\xff\xff"), ["{source}/tokenizer.json"]),
    "token no text": (write("tokenizer_config.json", '{"eos_token": 5}'), ["tokenizer_config.json", "eos_token is 5"]),
    "template no text": (write("tokenizer_config.json", '{"chat_template": 5}'), ["{source}", "chat_template is 5"]),
    "end no token": (write("generation_config.json", '{"eos_token_id": "a"}'), ["{source}", "eos_token_id is 'a'"]),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoint(case: str, tiny: Path, tmp_path: Path) -> None:
    change, words = CHECKPOINTS[case]
    source = shutil.copytree(tiny, tmp_path / "source")
    (tmp_path / "exports").mkdir()
    message = refused_export(change(source) or source, tmp_path / "exports" / "out")
    for word in words:
        assert word.format(source=source) in message, message


def test_a_tied_head_that_is_a_copy(tiny: Path, tmp_path: Path) -> None:
    """Some checkpoints hold the embedding twice, and tables that newer ones compute."""
    source = shutil.copytree(tiny, tmp_path / "source")
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    tensors(lambda content: content.update({"lm_head.weight": content[EMBEDDING].copy()} | table))(source)
    export_bundle(str(source), None, tmp_path / "out", ExportOptions(**SMALL), threads=2)


@pytest.mark.parametrize("size", [10, 10_000, 3_000_000, -1_000_000])
def test_gguf_cut_short(smollm2: Path, tmp_path: Path, size: int) -> None:
    path = Path(shutil.copyfile(smollm2, tmp_path / "cut.gguf"))
    os.truncate(path, size % smollm2.stat().st_size)
    message = refused_export(path, tmp_path / "out")
    path.unlink()
    assert f"{path} is damaged or cut short" in message


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ({"hidden": 48}, {}, ["hidden_size is 48", "int4", "32"]),
        ({"head_dim": 8}, {"precision": "fp32"}, ["head_dim is 8", "fused", "16", "standard"]),
        ({"vocab": 300}, {}, ["300 rows", "320 ids"]),
    ],
)
def test_shapes_that_cannot_be(
    shape: dict[str, int], options: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    source = write_tiny(tmp_path / "source", **shape)
    message = refused_export(source, tmp_path / "out", **options)
    for word in [str(source), *words]:
        assert word in message, message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tiers": (4, 2)}, ["[4, 2]", "rising"]),
        ({"tiers": (0, 2)}, ["[0, 2]", "from 1 up"]),
        ({"tiers": (2, 2)}, ["[2, 2]", "rising"]),
        ({"max_length": 1}, ["--max-length 1"]),
        ({"max_length": 8193}, ["{source}", "8192 positions", "--max-length 8193"]),
        ({"precision": "int3"}, ["'int3'", "fp32, fp16", "int8", "int4"]),
        ({"lowering": "odd"}, ["'odd'", "fused, standard"]),
        ({"lowering": "standard", "precision": "int8"}, ["standard", "int8", "fp32"]),
    ],
)
def test_options(options: dict[str, Any], words: list[str], tiny: Path, tmp_path: Path) -> None:
    message = refused_export(tiny, tmp_path / "out", **options)
    for word in words:
        assert word.format(source=tiny) in message, message


def test_draft_with_another_tokenizer(tiny: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(tiny, tmp_path / "draft")
    vocab: dict[str, int] = {}

    def swap(content: dict[str, Any]) -> None:
        vocab.update(content["model"]["vocab"])
        content["model"]["vocab"].update(a=vocab["b"], b=vocab["a"])

    edit("tokenizer.json", swap)(draft)
    message = refused_export(tiny, tmp_path / "out", draft)
    assert f"id {min(vocab['a'], vocab['b'])} is 'a' for the target and 'b' for the draft" in message


def test_out_is_never_overwritten(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    assert f"{tmp_path / 'out'} exists" in refused_export(tiny, tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("out", ["missing/out", "x" * 300, "/proc/out"])
def test_out_cannot_be_made(out: str, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / out
    message = refused(lambda: export_bundle(str(tiny), None, path, ExportOptions(**SMALL)))
    assert str(path.parent) in message
    assert refused_by_cli("export", "--target", tiny, "--draft", "none", "--out", path, "--max-length", 96) == message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit", [1_000, 50_000])
def test_full_disk(limit: int, tiny: Path, tmp_path: Path) -> None:
    """A file may not grow over the limit: the write fails in the middle, as on a full disk."""
    script = (
        "import resource, sys; import outrider.export; from outrider.cli import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2); main(sys.argv[2:])"
    )
    args = ["export", "--target", tiny, "--draft", "none", "--out", tmp_path / "out", "--max-length", 96]
    command = [sys.executable, "-c", script, *map(str, [limit, *args])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: could not write {tmp_path / 'out'}: File too large; nothing was kept\n"
    assert not list(tmp_path.iterdir())


def test_failed_check_leaves_no_bundle(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check._KL_LIMITS, "int4", 1e-12)
    message = refused_export(tiny, tmp_path / "out")
    assert "int4" in message and str(tiny) in message and "1e-12" in message


@pytest.mark.parametrize("step", [1, 4, 6])
def test_interrupted_export_leaves_nothing(step: int, tiny: Path, tmp_path: Path) -> None:
    def progress(stage: str, done: int, total: int) -> None:
        assert len(list(tmp_path.iterdir())) == 1  # the unfinished bundle
        if done == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_bundle(str(tiny), None, tmp_path / "out", ExportOptions(**SMALL), threads=2, progress=progress)
    assert not list(tmp_path.iterdir())
