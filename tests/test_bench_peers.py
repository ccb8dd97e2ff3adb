"""Peers side by side: figures against ones counted by hand, workers that fail, and Outrider's own worker."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import bench_peers
import numpy as np
import pytest
from click.testing import CliRunner
from peers.report import Arm, Report, plot, table, turns
from peers.table import PEERS, Peer
from peers.work import Work, write_plain_draft
from peers.worker import Worker
from safetensors.numpy import load_file, save_file

from outrider.engines.errors import OutriderError
from outrider.export.checkpoint import open_checkpoint, read_all
from outrider.runtime import Pipeline

HERE = Path(bench_peers.__file__).parent
STAND_IN = """
import sys
sys.path.insert(0, {folder!r})
from serve import serve

def load(config):
    if config["fault"] == "start":
        sys.exit("no such model")
    def decode(ids, max_new_tokens, setting):
        print("noise on standard output")
        if setting.get("refused"):
            raise ValueError("K is\\ntoo large")
        if config["fault"] == "crash" and max_new_tokens == 4:
            sys.exit("out of memory")
        count = max_new_tokens - setting.get("short", 0)
        return {{"ids": ids[-1:] * count, "seconds": setting["seconds"], "tokens": count, "passes": count}}
    return "stand-in 1", decode

serve(load)
"""


def reply(seconds: float, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"ids": ids, "seconds": seconds, "tokens": 10, "passes": 5, **more}


def arm(peer: str, setting: str, seconds: list[float], ids: list[int] | None = None, **more: Any) -> Arm:
    made = Arm(peer, setting)
    for prompt, value in enumerate(seconds):
        made.add(prompt, reply(value, [prompt] if ids is None else ids, **more))
    return made


def test_figures_are_those_counted_by_hand(tmp_path: Path) -> None:
    fast = arm("outrider", "model, K=2", [1.0, 2.0, 4.0], proposed=8, accepted=4)
    arms = [
        arm("outrider", "plain", [2.0, 2.0, 8.0], ids=[7]),
        arm("outrider", "exact", [2.0, 4.0, 8.0]),
        fast,
        arm("outrider", "auto", [1.0, 1.0, 2.0]),
        arm("other", "plain", [4.0, 8.0, 4.0]),
        arm("other", "lookup", [2.0, 8.0, 8.0], ids=[0]),
        Arm("broken", "-", failure="no wheel"),
    ]
    report = Report(arms, ["chat", "chat", "code"], {"outrider": "exact", "other": "plain", "broken": "plain"})
    assert report.best_plain is arms[0]  # 2 seconds in the middle against 4
    by_arm = {(row["peer"], row["setting"]): row for row in report.rows()}
    row = by_arm["outrider", "model, K=2"]
    assert row["ms_per_token"] == pytest.approx(200)
    assert row["over_own_plain"] == row["over_best_plain"] == 2.0  # of 2, 1, 2
    assert row["over_best_plain_by_category"] == {"chat": 1.5, "code": 2.0}
    assert (row["tokens_per_pass"], row["draft_acceptance_rate"], row["same_ids"]) == (2.0, 0.5, 3)
    assert by_arm["outrider", "plain"]["same_ids"] == 0
    assert by_arm["other", "lookup"]["same_ids"] == 1
    assert by_arm["broken", "-"] == {"peer": "broken", "setting": "-", "failure": "no wheel"}
    found = {entry["category"]: entry for entry in report.comparisons()}
    assert found[None] == {"peer": "other", "category": None, "setting": "plain", "best": 4.0, "auto": 4.0}
    assert found["chat"] == {"peer": "other", "category": "chat", "setting": "lookup", "best": 3.0, "auto": 5.0}
    assert report.agreement() == {"other": 3}
    text = table(report)
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("broken")] == ["wheel"]
    plot(report, tmp_path / "speeds.svg")
    drawn = (tmp_path / "speeds.svg").read_text()
    assert "outrider, model, K=2" in drawn
    assert "broken" not in drawn

    fast.add(0, reply(3.0, [0]))  # a second round: the faster counts, and ids of both must be the same
    assert fast.seconds_per_token(0) == pytest.approx(0.1)
    fast.add(1, reply(2.0, [5]))
    assert fast.same_ids(arms[1]) == 2


def test_the_order_of_turns_is_reversed_from_prompt_to_prompt_and_from_round_to_round() -> None:
    arms = [Arm("a", "plain"), Arm("b", "plain")]
    order = [(prompt, turn.peer) for prompt, turn in turns(arms, 2, 2)]
    assert order == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (0, "b"), (0, "a"), (1, "a"), (1, "b")]


def test_a_peer_that_fails_says_why_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN.format(folder=str(HERE / "peers")))

    def peer(fault: str, **settings: dict[str, Any]) -> Peer:
        return Peer(str(script), lambda given: (Path(sys.executable), {"fault": fault}), settings)

    half = {"seconds": 0.5}
    monkeypatch.setattr(
        bench_peers,
        "PEERS",
        {
            "good": peer("", plain=half, draft={"refused": True}, lookup={"short": 1, **half}),
            "down": peer("start", plain=half),
            "crashing": peer("crash", plain=half, draft=half),
        },
    )

    monkeypatch.setattr(bench_peers, "_WARM_UP", 2)

    class Given:
        work = type("Work", (), {"folder": tmp_path})

    workers, arms = bench_peers.start(["good", "down", "crashing"], Given())
    try:
        bench_peers.measure(workers, arms, [[5], [6]], 4, 1)
    finally:
        for worker in workers.values():
            worker.close()
    failures = {(each.peer, each.setting): each.failure for each in arms}
    assert failures == {
        ("good", "plain"): None,
        ("good", "draft"): "ValueError: K is too large",
        ("good", "lookup"): "it gave 1 tokens where 2 were asked for",
        ("down", "-"): "its worker ended with status 1: no such model",
        ("crashing", "plain"): "its worker ended with status 1: out of memory",
        ("crashing", "draft"): "its worker is gone",
    }
    assert [run["ids"] for runs in arms[0].runs.values() for run in runs] == [[5] * 4, [6] * 4]


def test_outriders_worker_gives_the_ids_of_generate(tiny_bundle: Path, tiny_pipeline: Pipeline, tmp_path: Path) -> None:
    prompt = "the quick brown fox"
    config = {"bundle": str(tiny_bundle), "threads": 2}
    worker = Worker(Path(sys.executable), HERE / "peers" / "outrider_worker.py", config, tmp_path / "log")
    try:
        for name, setting in PEERS["outrider"].settings.items():
            if name != "plain":
                found = worker.decode(tiny_pipeline.encode(prompt), 12, setting)
                expected = tiny_pipeline.generate(prompt, k=0, max_new_tokens=12, ignore_eos=True)
                assert (found["ids"], found["tokens"]) == (list(expected.token_ids), 11), name
    finally:
        worker.close()


def test_the_draft_for_peers_has_a_head_of_all_tokens(tiny: Path, tiny_draft: Path, tmp_path: Path) -> None:
    kept = np.arange(0, 320, 2)
    reduced = copytree(tiny_draft, tmp_path / "reduced")
    shard, index = next(reduced.glob("*.safetensors")), reduced / "model.safetensors.index.json"
    head = np.random.default_rng(0).standard_normal((len(kept), 64)).astype(np.float32)
    own = {"lm_head.weight": head, "d2t": kept - np.arange(len(kept))}
    save_file(load_file(shard) | own, shard)
    weights = json.loads(index.read_text())["weight_map"] | dict.fromkeys(own, shard.name)
    index.write_text(json.dumps({"weight_map": weights}))
    config = open_checkpoint(str(tiny_draft)).config | {"draft_vocab_size": len(kept), "tie_word_embeddings": False}
    (reduced / "config.json").write_text(json.dumps(config))

    write_plain_draft(str(reduced), str(tiny), tmp_path / "plain")
    plain, source = open_checkpoint(str(tmp_path / "plain")), open_checkpoint(str(tiny_draft))
    whole = read_all(plain, "lm_head.weight")
    assert whole.shape == (320, 64)
    assert (whole[kept] == head).all()
    assert not whole[1::2].any()
    name = "model.layers.0.mlp.down_proj.weight"
    assert (read_all(plain, name) == read_all(source, name)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--peers", "outrider,vllm"], "unknown peer 'vllm'; choose from outrider, onnxruntime-genai, "),
        (["--llama-cpp", "nowhere"], "--llama-cpp nowhere holds no llama-server"),
        (["--json", "nowhere/figures.json"], "nowhere does not exist; figures.json cannot be written there"),
        (["--prompts", "bad.jsonl"], 'bad.jsonl, line 2: expected {"prompt": "..."}'),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"prompt": "good"}\n{"text": "bad"}\n')
    result = CliRunner().invoke(bench_peers.main, ["target", "--draft", "draft", "--work", "work", *options])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {message}")
    assert result.output.count("\n") == 1
    assert not Path("work").exists()


def test_a_work_folder_is_of_one_pair(tmp_path: Path) -> None:
    Work(tmp_path / "work", "target", "draft")
    Work(tmp_path / "work", "target", "draft")
    with pytest.raises(OutriderError, match=r"holds exports of .*target and .*draft; give another"):
        Work(tmp_path / "work", "other", "draft")


def test_what_is_half_made_is_made_again(tmp_path: Path) -> None:
    work = Work(tmp_path / "work", "target", "draft")

    def fail(folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work.once("model", fail)
    assert not (work.folder / "model").exists()
    made = work.once("model", lambda folder: folder.mkdir())
    assert made == work.once("model", fail) == work.folder / "model"
