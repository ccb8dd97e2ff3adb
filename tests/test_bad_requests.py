"""Bad bundles, prompts and commands: one line that names the fault, before any token is generated."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_tokenizer, write_tiny
from refusals import Change, cli, cut, edit, flip, link_out, refused, refused_by_cli, remove, write

from outrider.engines.bundle import Bundle
from outrider.export import ExportOptions, export_bundle
from outrider.runtime import Pipeline, SamplingOptions
from outrider.runtime.bench import Prompt, read_prompts, run_bench

MANIFEST = "{bundle}/manifest.json"
Record = dict[str, Any]


def manifest(change: Callable[[Record], Any]) -> Change:
    return edit("manifest.json", change)


def listed(name: str) -> Change:
    """The manifest names one more file."""
    return manifest(lambda record: record["files"].update({name: {"bytes": 1, "sha256": "0"}}))


def without(*path: str) -> Change:
    def change(record: Record) -> None:
        *parents, last = path
        for name in parents:
            record = record[name]
        del record[last]

    return manifest(change)


BUNDLES: dict[str, tuple[Change, list[str]]] = {
    "nothing there": (lambda folder: folder / "nowhere", ["{bundle}/nowhere is not a folder", "export --out"]),
    "a name that is too long": (lambda folder: folder / ("x" * 300), ["File name too long"]),
    "a file": (lambda folder: folder / "manifest.json", ["{bundle}/manifest.json is not a folder"]),
    "no manifest": (remove("manifest.json"), ["{bundle} has no manifest.json"]),
    "no JSON": (write("manifest.json", "{"), [MANIFEST, "not valid JSON"]),
    "no text": (write("manifest.json", b"\xff\xfe"), [MANIFEST, "not valid JSON"]),
    "no object": (write("manifest.json", "[1]"), [MANIFEST, "not an Outrider manifest"]),
    "another format": (manifest(lambda record: record.update(format="zip")), [MANIFEST, "not an Outrider manifest"]),
    "newer": (manifest(lambda record: record.update(version=7)), [MANIFEST, "version 7", "version 5", "upgrade"]),
    "no files": (without("files"), [MANIFEST, "files"]),
    "file no object": (manifest(lambda record: record["files"].update(x=5)), [MANIFEST, "files.x is 5"]),
    "no target": (without("manifest", "target"), [MANIFEST, "manifest.target is missing"]),
    "no tiers": (without("manifest", "tiers"), [MANIFEST, "manifest.tiers is missing"]),
    "no draft": (without("manifest", "draft"), [MANIFEST, "manifest.draft is missing"]),
    "no capacity": (without("manifest", "target", "capacity"), [MANIFEST, "manifest.target.capacity is missing"]),
    "unknown field": (manifest(lambda record: record["manifest"].update(x=1)), [MANIFEST, "manifest.x is unknown"]),
    "text for tiers": (manifest(lambda record: record["manifest"].update(tiers="8")), [MANIFEST, "tiers is '8'"]),
    "text for a size": (
        manifest(lambda record: record["manifest"]["target"].update(num_layers="2")),
        [MANIFEST, "num_layers is '2'"],
    ),
    "graph not listed": (without("files", "target/model.onnx"), [MANIFEST, "does not list target/model.onnx"]),
    "weights missing": (remove("target/weights.bin"), ["{bundle}/target/weights.bin is missing"]),
    "tokenizer missing": (remove("tokenizer.json"), ["{bundle}/tokenizer.json is missing"]),
    "weights cut": (cut("target/weights.bin", lambda size: size - 1), ["{bundle}/target/weights.bin", "changed"]),
    "weights, one bit": (flip("target/weights.bin", 5000), ["{bundle}/target/weights.bin", "changed", "sha256"]),
    "draft, one bit": (flip("draft/weights.bin", 5000), ["{bundle}/draft/weights.bin", "changed"]),
    "graph, one bit": (flip("target/model.onnx", -1), ["{bundle}/target/model.onnx", "changed"]),
    "tokenizer, one bit": (flip("tokenizer.json", 100), ["{bundle}/tokenizer.json", "changed"]),
    "template, one bit": (flip("chat_template.jinja", 3), ["{bundle}/chat_template.jinja", "changed"]),
    "path up": (listed("../x"), [MANIFEST, "'../x'", "outside"]),
    "path up from inside": (listed("target/../../x"), [MANIFEST, "outside"]),
    "absolute path": (listed("/etc/passwd"), [MANIFEST, "'/etc/passwd'", "outside"]),
    "path with a zero": (listed("a\0b"), [MANIFEST, "outside"]),
    "link out": (link_out("tokenizer.json"), [MANIFEST, "'tokenizer.json'", "outside"]),
}


@pytest.mark.parametrize("case", BUNDLES)
def test_bundle(case: str, tiny_bundle: Path, tmp_path: Path) -> None:
    change, words = BUNDLES[case]
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    path = change(folder) or folder
    if case != "a name that is too long":  # the system's own error, which only the command turns into a line
        message = refused(lambda: Bundle(path))
        assert refused_by_cli("inspect", path) == message
    message = refused_by_cli("generate", path, "-p", "hello")
    for word in words:
        assert word.format(bundle=folder) in message, message


@pytest.fixture(scope="module")
def bare(workdir: Path) -> Path:
    """A bundle without a draft and without a chat template."""
    files = replace(tiny_tokenizer(), chat_template=None)
    source, out = write_tiny(workdir / "bare", files=files), workdir / "bare-bundle"
    export_bundle(str(source), None, out, ExportOptions(tiers=(1, 2), max_length=64), threads=2)
    return out


LONG = "one two three " * 60
MESSAGE = {"role": "user", "content": "hello"}
REQUESTS: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "empty text": ("", {}, ["prompt is empty"]),
    "no messages": ([], {}, ["prompt is empty", "message"]),
    "half a character": ("a \ud83d", {}, ["UTF-8"]),
    "half a character in a message": ([{"role": "user", "content": "\ud83d"}], {}, ["UTF-8"]),
    "too long": (LONG, {}, ["the prompt has {length} tokens", "at most 95", "--max-length"]),
    "K over the tiers": ("a", {"k": 9}, ["K = 9", "0 to 8", "--k 9"]),
    "K over the tiers with messages": ([MESSAGE], {"k": 100}, ["K = 100"]),
    "K negative": ("a", {"k": -1}, ["K = -1", "negative"]),
    "unknown drafter": ("a", {"drafter": "oracle"}, ["'oracle'", "model, ngram, cascade, none"]),
    "negative budget": ("a", {"max_new_tokens": -1}, ["max_new_tokens -1"]),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_request(case: str, tiny_pipeline: Pipeline) -> None:
    prompt, options, words = REQUESTS[case]
    message = refused(lambda: tiny_pipeline.stream(prompt, **options))
    length = len(tiny_pipeline.codec.encode(LONG))
    for word in words:
        assert word.format(length=length) in message, message
    assert tiny_pipeline.generate("a", max_new_tokens=2).token_ids  # the pipeline is as good as before


def test_request_that_the_bundle_has_nothing_for(bare: Path) -> None:
    pipeline = Pipeline.load(bare, threads=2)
    assert "no draft model" in refused(lambda: pipeline.stream("a", drafter="model"))
    assert "no chat template" in refused(lambda: pipeline.stream([MESSAGE]))
    assert "no draft model" in refused_by_cli("generate", bare, "-p", "a", "--drafter", "model")
    assert "no chat template" in refused_by_cli("chat", bare, input="hello\n")
    assert cli("generate", bare, "-p", "a").exit_code == 0


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ raise_exception('first\nsecond') }}", "{{ 1 + 'a' }}", "{{ ''.__class__.mro() }}"]
)
def test_template_that_fails(template: str, tiny_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_pipeline.codec, "_template", template)
    assert "chat template" in refused(lambda: tiny_pipeline.stream([MESSAGE]))


@pytest.mark.parametrize(
    ("args", "given", "words"),
    [
        (["-p", ""], None, ["prompt is empty"]),
        (["-p", "-"], "", ["prompt is empty"]),
        (["-p", "-"], b"\xff\xfe", ["UTF-8"]),
        (["-p", LONG], None, ["tokens", "at most 95"]),
        (["-p", "a", "--k", "9"], None, ["K = 9"]),
        (["-p", "a", "--k", "-1"], None, ["K = -1"]),
        (["-p", "a", "--max-new-tokens", "-1"], None, ["max_new_tokens -1"]),
        (["-p", "a", "--provider", "cuda"], None, ["int4, fused", "--precision fp16"]),
    ],
)
def test_generate_command(args: list[str], given: str | bytes | None, words: list[str], tiny_bundle: Path) -> None:
    import onnxruntime

    if "cuda" in args and "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("CUDA is here")
    message = refused_by_cli("generate", tiny_bundle, *args, input=given)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["{path} does not exist"]),
        (b"", ["{path} holds no prompt"]),
        (b"\n\n", ["{path} holds no prompt"]),
        (b'{"prompt": "a"}\n\n{"prompt": \n', ["{path}, line 3"]),
        (b'{"prompt": "a"}\n["a"]\n', ["{path}, line 2"]),
        (b'{"text": "a"}\n', ["{path}, line 1", "prompt"]),
        (b'{"prompt": ""}\n', ["{path}, line 1"]),
        (b'{"prompt": 5}\n', ["{path}, line 1", "5"]),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', ["{path}, line 2"]),
    ],
)
def test_prompts_file(content: bytes | None, words: list[str], tiny_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)
    message = refused(lambda: read_prompts(path))
    assert refused_by_cli("bench", tiny_bundle, "--prompts", path) == message
    for word in words:
        assert word.format(path=path) in message, message


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (LONG, {}, ["prompt p7", "tokens", "at most 95"]),
        ("a", {"tiers": (2, 16)}, ["K = 16", "0 to 8"]),
        ("a", {"tiers": (0, 2)}, ["[0, 2]"]),
        ("a", {"tiers": ()}, ["[]"]),
        ("a", {"max_new_tokens": 1}, ["max_new_tokens 1"]),
    ],
)
def test_bench(text: str, options: dict[str, Any], words: list[str], tiny_pipeline: Pipeline) -> None:
    prompts = [Prompt("p7", "all", text)]
    given = SamplingOptions(max_new_tokens=options.pop("max_new_tokens", 8))
    message = refused(lambda: run_bench(tiny_pipeline, prompts, **{"options": given, "tiers": (2,), **options}))
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    "args",
    [
        ["fly"],
        ["export"],
        ["export", "--target", "a", "--draft", "none"],
        ["export", "--target", "a", "--draft", "none", "--out", "b", "--k", "a,b"],
        ["export", "--target", "a", "--draft", "none", "--out", "b", "--k", ""],
        ["export", "--target", "a", "--draft", "none", "--out", "b", "--max-length", "many"],
        ["export", "--target", "a", "--draft", "none", "--out", "b", "--threads", "0"],
        ["inspect"],
        ["generate", "a"],
        ["generate", "a", "-p", "b", "--drafter", "oracle"],
        ["generate", "a", "-p", "b", "--colour"],
        ["bench", "a"],
    ],
)
def test_usage(args: list[str]) -> None:
    result = cli(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage:" in result.stderr and "Traceback" not in result.stderr
