"""`outrider tune`: what is measured, kept and read again, and what is not taken for this device's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import cli, refused, refused_by_cli

from outrider.runtime import Pipeline, SamplingOptions
from outrider.runtime.controller import EDGES, Controller
from outrider.runtime.trace import FORMAT, VERSION, read_trace
from outrider.runtime.tuning import read_tuning, tune, tuning_path, write_tuning

THREADS = 2


def run(*args: Any, exit_code: int = 0) -> tuple[str, str]:
    result = cli(*args)
    assert result.exit_code == exit_code, result.output
    return result.stdout, result.stderr


@pytest.fixture(scope="module")
def tuned(tiny_bundle: Path, workdir: Path) -> Path:
    """A bundle with its figures, written by the command."""
    bundle = Path(shutil.copytree(tiny_bundle, workdir / "tuned"))
    stdout, stderr = run("tune", bundle, "--threads", THREADS)
    lines = stdout.splitlines()
    assert lines[0].split() == ["context", "64", "96"]
    assert [line[:14].strip() for line in lines[1:10]] == ["plain", *(f"verify K = {k}" for k in range(1, 9))]
    assert "v = 1.00" in lines[1] and any("draft step" in line and "c = " in line for line in lines)
    assert any(line.startswith("host: ") for line in lines)
    assert lines[-1].startswith(f"kept in {bundle / 'tuning'}") and stderr == ""
    return bundle


def test_figures_are_kept_for_the_next_process(tuned: Path) -> None:
    pipeline = Pipeline.load(tuned, threads=THREADS)
    assert pipeline.tuning.origin.startswith("tuned 20")
    costs = pipeline.tuning.costs
    assert costs.lengths == (64, 96) and costs.largest_k == 8 and costs.draft_rows[0] == 1
    assert costs.round_host > 0
    result = pipeline.generate("the quick brown fox", max_new_tokens=8)
    assert result.tuning == pipeline.tuning.origin
    record = json.loads(next((tuned / "tuning").iterdir()).read_text())
    assert "2 threads" in record["device"] and "onnxruntime" in record["device"]
    fewest = pipeline.target.min_rows - 1  # a plain pass is the same where one row takes two
    for times in record["samples"][f"verify {fewest}"].values():
        assert len(times) >= 1 and min(times) > 0


def test_the_hosts_part_of_a_plain_round_is_that_of_plain_decoding(tiny_pipeline: Pipeline) -> None:
    """A controller that is at hand is not asked where K is given."""
    request = tiny_pipeline.new_request(tiny_pipeline.encode("a"), SamplingOptions(max_new_tokens=9, ignore_eos=True))
    controller = Controller(tiny_pipeline.tuning.costs)
    for _ in tiny_pipeline.decode(request, "cascade", 0, controller=controller):
        pass
    assert request.stats.sources == {} and request.stats.draft_steps == 0


def test_figures_in_json(tuned: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(tuned, tmp_path / "bundle")
    stdout, stderr = run("tune", bundle, "--threads", THREADS, "--json")
    record = json.loads(stdout)
    assert len(record["costs"]["verify"]) == 9 and set(record["priors"]) == set(EDGES)
    assert stderr.startswith("kept in ")


def test_without_figures_a_short_version_is_measured(tiny_bundle: Path) -> None:
    pipeline = Pipeline.load(tiny_bundle, threads=THREADS)
    assert pipeline.generate("a", k=2, max_new_tokens=2).tuning is None
    assert (
        pipeline.generate("a", max_new_tokens=2).tuning
        == f"measured in short (not tuned: run `outrider tune {tiny_bundle}`)"
    )


def test_an_interrupted_measurement_leaves_no_trace(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the caches held is overwritten, and must not be taken for what they hold."""
    pipeline = Pipeline.load(tiny_bundle, threads=THREADS)
    prompt = "one two three four five six seven eight nine ten"
    before = pipeline.generate(prompt, k=0, max_new_tokens=5, logprobs=1)
    with monkeypatch.context() as patch:
        patch.setattr("outrider.runtime.tuning._costs", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pipeline.generate(prompt, max_new_tokens=5)
    after = pipeline.generate(prompt, k=0, max_new_tokens=5, logprobs=1)
    assert (after.token_ids, after.logprobs, after.stats.num_cached_tokens) == (before.token_ids, before.logprobs, 0)


def test_nothing_is_measured_for_nothing(tiny_bundle: Path) -> None:
    """A request without a round, or cancelled before it ran, leaves a running one alone."""
    pipeline = Pipeline.load(tiny_bundle, threads=THREADS)
    running = pipeline.stream("the quick brown fox", k=0, max_new_tokens=6)
    next(iter(running))
    assert pipeline.generate("a", max_new_tokens=0).tuning is None
    cancelled = pipeline.stream("a", max_new_tokens=5)
    cancelled.cancel()
    assert cancelled.result().tuning is None
    assert len(running.result().token_ids) == 6


def test_a_draft_that_gives_no_numbers_does_not_stop_others(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline.load(tiny_bundle, threads=THREADS)
    assert pipeline.draft is not None
    original = pipeline.draft.extend
    monkeypatch.setattr(pipeline.draft, "extend", lambda tokens, rows: original(tokens, rows) * np.float32("nan"))
    result = pipeline.generate("the quick brown fox", drafter="ngram", max_new_tokens=5)
    assert result.tuning is not None and "without drafts: the draft model gives no numbers" in result.tuning


def test_figures_of_other_threads_are_others(tuned: Path) -> None:
    """They are in a file of their own, and named where they are not this device's."""
    origin = Pipeline.load(tuned, threads=1).tuning.origin
    assert "no figures of this device" in origin and "1 threads" in origin and "outrider tune" in origin


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "device": (lambda record: record.update(device="Abacus, 10 beads"), "of another device (Abacus, 10 beads)"),
    "bundle": (lambda record: record.update(bundle="0" * 16), "of another bundle"),
    "version": (lambda record: record.update(version=99), "version 99"),
    "format": (lambda record: record.update(format="recipe"), "is recipe"),
    "missing": (lambda record: record.pop("costs"), "damaged"),
    "times": (lambda record: record["costs"]["verify"][0].__setitem__(0, -1.0), "damaged"),
    "text": (lambda record: record["costs"]["verify"][0].__setitem__(0, "fast"), "damaged"),
    "lengths": (lambda record: record["costs"].update(lengths=[64]), "damaged"),
    "tiers": (lambda record: record["costs"]["verify"].pop(), "of other tiers"),
    "no numbers": (lambda record: record["costs"]["verify"][0].__setitem__(0, float("nan")), "damaged"),
    "host": (lambda record: record["costs"].update(round_host=-1.0), "damaged"),
    "priors": (lambda record: record["priors"]["lookup"].pop(), "damaged"),
    "more stood than were judged": (lambda record: record["priors"].update(table=[[2, 1], [0, 0]]), "damaged"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_file_that_does_not_fit_is_named(name: str, tuned: Path, tmp_path: Path) -> None:
    """It is never used: decoding goes on with a short measurement, which says why."""
    bundle = Path(shutil.copytree(tuned, tmp_path / "bundle"))
    pipeline = Pipeline.load(bundle, threads=THREADS)
    path = next((bundle / "tuning").iterdir())
    record = json.loads(path.read_text())
    change, words = DAMAGE[name]
    change(record)
    path.write_text(json.dumps(record))
    found = read_tuning(pipeline)
    assert isinstance(found, str) and words in found and str(path) in found and "outrider tune" in found
    assert pipeline.tuning.origin == f"measured in short ({found})"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"3"])
def test_damaged_json_is_named(content: bytes, tuned: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(tuned, tmp_path / "bundle"))
    pipeline = Pipeline.load(bundle, threads=THREADS)
    next((bundle / "tuning").iterdir()).write_bytes(content)
    found = read_tuning(pipeline)
    assert isinstance(found, str) and "damaged" in found


def test_figures_that_cannot_be_kept_are_printed(tiny_bundle: Path, tmp_path: Path) -> None:
    """As in a folder that is read-only; here a file is in the way, since a superuser may write anywhere."""
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    (bundle / "tuning").write_text("in the way")
    stdout, stderr = run("tune", bundle, "--threads", THREADS, exit_code=1)
    assert "verify K = 8" in stdout
    assert stderr.count("\n") == 1 and "cannot be written" in stderr and str(bundle / "tuning") in stderr


def test_an_interrupted_write_leaves_the_old_figures(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Path(shutil.copytree(tuned, tmp_path / "bundle"))
    pipeline = Pipeline.load(bundle, threads=THREADS)
    path = tuning_path(pipeline.bundle, pipeline.target_engine.device + f"; draft: {pipeline.draft_engine.device}")  # type: ignore[union-attr]
    before = path.read_bytes()
    tuning = tune(pipeline, short=True)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda self, other: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_tuning(pipeline, tuning)
    assert path.read_bytes() == before
    assert isinstance(read_tuning(pipeline), type(tuning))


NO_DRAFT: dict[str, Any] = {"draft_rows": [], "draft": [], "draft_step": [], "draft_host": 0}
HEAD = {
    "format": FORMAT,
    "version": VERSION,
    "device": "",
    "costs": {"lengths": [64], "verify": [[1.0]], "round_host": 0, **NO_DRAFT},
}
REQUEST = {"id": "a", "category": "b", "num_prompt_tokens": 3, "positions": [{"lookup": [[2, 3], 1]}]}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], ["line 1", "no trace"]),
        (["x"], ["line 1", "no trace"]),
        ([HEAD | {"version": 0}, REQUEST], ["version 0", f"version {VERSION}"]),
        ([HEAD | {"format": "diary"}, REQUEST], ["is diary"]),
        ([HEAD | {"costs": {}}, REQUEST], ["line 1", "costs"]),
        ([HEAD], ["no request"]),
        ([HEAD, "{"], ["line 2"]),
        ([HEAD, REQUEST, {"id": 1}], ["line 3"]),
        ([HEAD, REQUEST | {"positions": [{"lookup": [[2], 3]}]}], ["line 2", "lookup 3 of 1"]),
        ([HEAD, REQUEST | {"positions": [{"oracle": [[2], 0]}]}], ["line 2", "oracle"]),
        ([HEAD, REQUEST | {"positions": 7}], ["line 2"]),
        ([HEAD, REQUEST | {"positions": [{"model": [[0.5], 1]}]}], ["no costs"]),
    ],
)
def test_a_trace_that_cannot_be_read(lines: list[Any], words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    message = refused(lambda: read_trace(path))
    assert str(path) in message and all(word in message for word in words)


def test_a_trace_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(b"\xff\xfe")
    assert "line 1" in refused(lambda: read_trace(tmp_path / "trace"))


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    assert "bench --trace" in refused(lambda: read_trace(tmp_path / "nothing"))


def test_k_is_a_number_or_auto(tiny_bundle: Path) -> None:
    _, stderr = run("generate", tiny_bundle, "-p", "a", "--k", "many", exit_code=2)
    assert "'many' is no whole number, and not auto" in stderr
    assert "K = 9 is outside 0 to 8" in refused_by_cli("generate", tiny_bundle, "-p", "a", "--k", "9")
