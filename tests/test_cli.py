"""Every command from the outside: what goes to standard output, what to standard error, and what machines read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from refusals import cli, refused_by_cli

from outrider.engines.bundle import Bundle
from outrider.runtime import Pipeline
from outrider.runtime.trace import read_trace

PROMPT = "the quick brown fox"
PROMPTS = [("fox", PROMPT), ("code", "def add(a, b):"), ("code", "one two three four one two three")]
TOKENS = 24


def run(*args: Any, **more: Any) -> tuple[str, str]:
    """Standard output and standard error of a command that must succeed."""
    result = cli(*args, **more)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def generate(bundle: Path, *args: Any, **more: Any) -> tuple[str, str]:
    return run("generate", bundle, "--threads", 2, "--max-new-tokens", TOKENS, *args, **more)


def as_messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def shown(text: str) -> str:
    """As click's test runner gives it back."""
    return text.replace("\r\n", "\n")


def test_export_json(tiny: Path, tiny_draft: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = ["--target", tiny, "--draft", tiny_draft, "--out", out, "--k", "1,4", "--max-length", 64, "--threads", 2]
    stdout, stderr = run("export", *args, "--json")
    facts = json.loads(stdout)
    assert stderr == ""  # the progress bar is for people
    assert facts["bundle"] == str(out)
    assert (facts["tiers"], facts["max_length"]) == ([1, 4], 64)
    for role in ("target", "draft"):
        assert facts[role]["precision"] == "int4"
        assert facts[role]["exactness"] == "bitwise"
        assert facts[role]["check"]["kl"] >= 0
    assert Bundle(out).manifest.target.num_layers == facts["target"]["num_layers"] == 2


def test_export_text(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = ["--target", tiny, "--draft", "none", "--out", out, "--max-length", 64, "--precision", "fp32"]
    target, bundle = run("export", *args)[0].splitlines()
    assert target.startswith("target  llama, 2 layers, fp32, ")
    assert "bit-equal from" in target and "greedy agreement 100.0%" in target
    assert bundle.startswith(f"bundle  {out} (K = 2, 4, 8; ")
    assert Bundle(out).manifest.draft is None


def test_inspect_json(tiny_bundle: Path) -> None:
    facts = json.loads(run("inspect", tiny_bundle, "--threads", 2, "--json")[0])
    assert (facts["tiers"], facts["max_length"], facts["exactness_here"]) == ([1, 2, 4, 8], 96, "bitwise")
    assert facts["target"]["num_layers"] == 2 and facts["draft"]["num_layers"] == 1
    for role in ("target", "draft"):
        engine = facts["here"][role]
        assert (engine["threads"], engine["provider"]) == (2, "CPUExecutionProvider")
        assert engine["execution"] == "ORT_SEQUENTIAL"
        assert engine["session.force_spinning_stop"] == "1"
        assert "2 threads" in engine["device"]
    files = {path.relative_to(tiny_bundle).as_posix() for path in tiny_bundle.rglob("*") if path.is_file()}
    assert set(facts["files"]) == files - {"manifest.json"}
    assert all(re.fullmatch("[0-9a-f]{64}", entry["sha256"]) for entry in facts["files"].values())


def test_inspect_text(tiny_bundle: Path) -> None:
    lines = dict(line.split(": ", 1) for line in run("inspect", tiny_bundle, "--threads", 2)[0].splitlines())
    assert (lines["tiers"], lines["max_length"], lines["exactness_here"]) == ("1 2 4 8", "96", "bitwise")
    assert "threads 2, execution ORT_SEQUENTIAL" in lines["here.target"]
    assert "precision int4" in lines["target"] and "kl " in lines["target"]
    assert "sha256 " in lines["files.target/weights.bin"]


@pytest.mark.parametrize(("args", "who"), [([], "cascade K=auto"), (["--drafter", "model", "--k", 4], "model K=4")])
def test_generate_text(args: list[Any], who: str, tiny_bundle: Path, tiny_pipeline: Pipeline) -> None:
    stdout, stderr = generate(tiny_bundle, "-p", PROMPT, *args)
    result = tiny_pipeline.generate(as_messages(PROMPT), max_new_tokens=TOKENS)
    assert stdout == shown(result.text) + "\n"
    assert re.fullmatch(
        rf"{TOKENS} tokens \(length\), [\d.]+ tokens/s, {who}: [\d.]+ tokens a verify pass, "
        r"\d+ of \d+ drafts accepted \(\d+%\), exactness bitwise\n(\[K chosen by figures measured in short .*\]\n)?",
        stderr,
    )


def test_what_was_chosen_is_said(tiny_bundle: Path) -> None:
    _, stderr = generate(tiny_bundle, "-p", PROMPT, "--show-rounds")
    assert f"[K chosen by figures measured in short (not tuned: run `outrider tune {tiny_bundle}`)]" in stderr
    assert re.search(
        r"^\[(plain|lookup|model): \d+ rounds, K = [\d.]+; [\d.]+ tokens in [\d.]+ ms expected, [\d.]+ came; "
        r"\d+ tokens drafted by the model\]$",
        stderr,
        re.MULTILINE,
    )


def test_generate_raw_continues_the_text(tiny_bundle: Path, tiny_pipeline: Pipeline) -> None:
    raw, chat = (generate(tiny_bundle, "-p", PROMPT, *flag)[0] for flag in (["--raw"], []))
    assert raw == shown(tiny_pipeline.generate(PROMPT, max_new_tokens=TOKENS).text) + "\n"
    assert raw != chat


@pytest.mark.parametrize(
    "args", [["--k", "1"], ["--k", "4"], ["--k", "8", "--drafter", "ngram"], ["--drafter", "none"]]
)
@pytest.mark.parametrize("prompt", [PROMPT, PROMPTS[2][1]])
def test_speculation_changes_nothing_on_standard_output(tiny_bundle: Path, args: list[str], prompt: str) -> None:
    plain, summary = generate(tiny_bundle, "-p", prompt, "--k", "0")
    assert "plain decoding" in summary
    assert generate(tiny_bundle, "-p", prompt, *args)[0] == plain


def test_generate_json(tiny_bundle: Path, tiny_pipeline: Pipeline) -> None:
    stdout, stderr = generate(tiny_bundle, "-p", PROMPT, "--json", "--drafter", "model", "--k", 2)
    facts = json.loads(stdout)
    result = tiny_pipeline.generate(as_messages(PROMPT), max_new_tokens=TOKENS, k=2, drafter="model")
    assert stderr == ""
    for name in ("text", "token_ids", "finish_reason", "drafter", "k", "exactness"):
        assert facts[name] == getattr(result, name)
    assert facts["origins"] == [origin.value for origin in result.origins]
    counters = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "acceptance_histogram")
    for name in (*counters, "mean_acceptance_length", "draft_acceptance_rate"):
        assert facts["stats"][name] == getattr(result.stats, name)


def test_generate_shows_rounds_in_colour(tiny_bundle: Path) -> None:
    plain, _ = generate(tiny_bundle, "-p", PROMPT, "--k", 4)
    coloured, legend = generate(tiny_bundle, "-p", PROMPT, "--k", 4, "--show-rounds", color=True)
    assert click.unstyle(coloured) == plain
    assert "\x1b[31m" in coloured  # corrections
    assert "\x1b[31mcorrection\x1b[0m" in legend and "exactness" in legend
    # Into a file there are no codes.
    assert generate(tiny_bundle, "-p", PROMPT, "--k", 4, "--show-rounds")[0] == plain


def test_generate_reads_standard_input(tiny_bundle: Path) -> None:
    text = "def añadir(a):\n    return 'ü' * 2\n"
    assert generate(tiny_bundle, "-p", "-", input=text)[0] == generate(tiny_bundle, "-p", text)[0]


@pytest.mark.parametrize("args", [["--k", "0"], ["--k", "4", "--drafter", "ngram"], []])
def test_chat_over_a_pipe(tiny_bundle: Path, tiny_pipeline: Pipeline, args: list[str]) -> None:
    """Two turns: the second prompt holds the first answer. An empty line leaves."""
    messages: list[dict[str, str]] = []
    answers = []
    for line in ("one two", "three four"):
        messages += as_messages(line)
        answers.append(tiny_pipeline.generate(messages, max_new_tokens=8, k=0).text)
        messages.append({"role": "assistant", "content": answers[-1]})
    options = ["--threads", 2, "--max-new-tokens", 8, *args]
    stdout, stderr = run("chat", tiny_bundle, *options, input="one two\nthree four\n\nfive six\n")
    assert stdout == shown("".join(f"{answer}\n" for answer in answers))
    assert stderr.count("[cut off: --max-new-tokens") == 2  # eight tokens are no answer
    assert run("chat", tiny_bundle, *options, input="")[0] == ""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"category": category, "prompt": text}) for category, text in PROMPTS]
    path.write_text("\n\n".join(lines))
    return path


ARMS = [
    "plain",
    "plain, exact",
    "auto",
    *(f"{drafter}, K={k}" for drafter in ("ngram", "model", "cascade") for k in (2, 4)),
]


def bench(bundle: Path, prompts: Path, *args: Any) -> str:
    options = ["--k", "2,4", "--max-new-tokens", 12, "--threads", 2, *args]
    stdout, stderr = run("bench", bundle, "--prompts", prompts, *options)
    assert stderr == ""
    return stdout


def test_bench_json(tiny_bundle: Path, prompts: Path) -> None:
    report = json.loads(bench(tiny_bundle, prompts, "--json"))
    assert report["num_runs"] == len(PROMPTS)
    assert [arm["name"] for arm in report["arms"]] == ARMS
    for arm in report["arms"]:
        assert arm["name"] == "plain" or arm["identical"] == len(PROMPTS), arm
        assert arm["tokens_per_second"] > 0
        assert set(arm["speed_up_by_category"]) == {"fox", "code"}
        assert arm["mean_acceptance_length"] >= 1
        assert arm["verify_cost"] > 0 if arm["k"] else arm["verify_cost"] is None
        low, high = arm["speed_up_quartiles"]
        assert low <= arm["speed_up"] <= high
        assert bool(arm["sources"]) == (arm["name"] == "auto")
    assert report["arms"][0]["speed_up"] == 1


def test_bench_text(tiny_bundle: Path, prompts: Path) -> None:
    head, asked, costs, header, *rows = bench(tiny_bundle, prompts).splitlines()
    assert head.startswith("llama int4, ") and "2 threads" in head
    assert asked == f"{len(PROMPTS)} runs, max_new_tokens {asked.split()[3][:-1]}, acceptance exact"
    assert costs.startswith("plain round ") and "draft step c = " in costs and "measured in short" in costs
    assert header.split()[:2] == ["tok/s", "ms/tok"] and header.endswith("same ids")
    assert [row[:14].strip() for row in rows[: len(ARMS)]] == ARMS
    # Plain decoding at its fastest has bits of its own, so its text may differ; all others agree.
    assert all(row.endswith(f"{len(PROMPTS)} of {len(PROMPTS)}") for row in rows[1 : len(ARMS)])
    assert [row.partition(":")[0] for row in rows[len(ARMS) : len(ARMS) + 2]] == ["choose", "same ids"]
    assert "category" in rows[len(ARMS) + 3]
    assert rows[len(ARMS) + 4].split() == ["fox", "code"]


def test_bench_report(tiny_bundle: Path, prompts: Path, tmp_path: Path) -> None:
    """A page, its figures, its plots, and a trace that replays."""
    report, trace = tmp_path / "report", tmp_path / "trace.jsonl"
    printed = bench(tiny_bundle, prompts, "--report", report, "--trace", trace, "--contexts", "40", "--repeats", 2)
    assert "40 tokens" in printed and f"{2 * (len(PROMPTS) + 1)} runs" in printed
    page = (report / "report.md").read_text()
    assert printed.strip() in page and "| auto | " in page
    plots = re.findall(r"\(([\w-]+\.png)\)", page)
    assert len(plots) == 5 and all((report / name).read_bytes().startswith(b"\x89PNG") for name in plots)
    record = json.loads((report / "report.json").read_text())
    assert set(record["predicted_speed_up"]) == set(ARMS[1:])
    assert record["predicted_speed_up"]["plain, exact"] == 1
    assert [request.category for request in read_trace(trace).requests] == [category for category, _ in PROMPTS]
    script = Path(__file__).parents[1] / "scripts" / "replay.py"
    replayed = subprocess.run([sys.executable, script, trace], check=True, capture_output=True, text=True).stdout
    assert {"oracle", "auto", "cascade, K=8", "auto, all wrong"} <= {
        line[:16].strip() for line in replayed.splitlines()
    }
    message = refused_by_cli("bench", tiny_bundle, "--prompts", prompts, "--report", report)
    assert str(report) in message and "exists" in message
    message = refused_by_cli("bench", tiny_bundle, "--prompts", prompts, "--contexts", "4000")
    assert "4000 tokens" in message and "--max-length" in message


def test_chat_forgets_the_oldest_turns_when_the_context_is_full(tiny_bundle: Path) -> None:
    """A long conversation goes on instead of ending in an error."""
    lines = "the quick brown fox jumps over the lazy dog\n" * 6
    _, stderr = run("chat", tiny_bundle, "--max-new-tokens", 8, "--threads", 2, input=lines)
    assert "the context is full" in stderr


def test_help_and_version() -> None:
    stdout, _ = run("--help")
    for command in ("export", "inspect", "tune", "generate", "chat", "bench"):
        assert f"  {command}" in stdout
        assert "Usage:" in run(command, "-h")[0]
    assert "0.1.0" in run("--version")[0]


def test_a_grammar_from_a_file(tiny_bundle: Path, tmp_path: Path) -> None:
    """Editors end a file with a line break that nobody means; a text may begin with the sign of a file."""
    (tmp_path / "regex").write_text("[0-9]{3}\n")
    stdout, _ = run("generate", tiny_bundle, "-p", "a", "--regex", f"@{tmp_path / 'regex'}")
    assert re.fullmatch("[0-9]{3}\n", stdout)
    stdout, _ = run("generate", tiny_bundle, "-p", "a", "--regex", "@@[0-9]")
    assert re.fullmatch("@[0-9]\n", stdout)


def test_an_incomplete_grammar_is_named(tiny_bundle: Path) -> None:
    _, stderr = run("generate", tiny_bundle, "-p", "a", "--regex", "[0-9]{30}", "--max-new-tokens", 3)
    assert "grammar was complete" in stderr


def test_every_test_that_the_readme_names_exists() -> None:
    root = Path(__file__).parents[1]
    named = re.findall(r"`(test_\w+)(?:::(test_\w+))?`", (root / "README.md").read_text())
    assert len(named) > 8
    for module, function in named:
        source = (root / "tests" / f"{module}.py").read_text()
        assert not function or f"def {function}(" in source, f"{module}::{function}"
