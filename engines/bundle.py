"""The bundle: a folder with a manifest, the graphs and weights of a target and its draft, and the tokenizer.

bundle/
  manifest.json        what is inside, how it was checked, sha256 of every other file
  target/model.onnx    one graph a model, for prefill, verify and plain decoding
  target/model.resident.onnx  the same with heads behind its logits, for rounds that stay on their device
  target/model.packed.onnx    the same for many sequences at once; absent where attention cannot take them
  target/weights.bin   of both
  draft/...            absent when the bundle was exported with ``--draft none``; a draft of some of the target's layers
                       is target/draft.onnx, over the same weights
  draft/tokenizer.json only when the draft's tokenizer is not the target's
  tokenizer.json
  chat_template.jinja  absent when the checkpoint has none
  engines/...          what `outrider build` made of the graphs
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, get_args, get_origin, get_type_hints

from outrider.engines.errors import OutriderError

FORMAT = "outrider-bundle"
VERSION = 5
MANIFEST = "manifest.json"
ABSENT = "absent"  # of a graph
TOKENIZER = "tokenizer.json"
WEIGHTS = "weights.bin"  # beside each graph
CUT_GRAPH = "target/draft.onnx"  # of a draft that is a part of the target
ENGINES = "engines"
CHAT_TEMPLATE = "chat_template.jinja"
NEXT_TOKENS = "next_tokens.npz"  # see next_tokens.py


@dataclass(frozen=True)
class ModelInfo:
    """What an engine must know of a graph, and what was proved of it at export.

    ``capacity`` is the number of cache positions a sequence owns; ``exactness`` and ``min_rows`` are what the row probe
    found on ``device`` (see ``probe.py``), ``unprobed`` where none could run; ``packed_exactness`` is ``bitwise`` where
    the packed graph gives the same bits there, ``absent`` where there is none; ``check`` is the comparison with the
    checkpoint. ``tokenizer`` is the file of its vocabulary: the target's, or one of its own for a draft that is
    translated. ``tensor_precision`` are the precisions of matrices that have one of their own, by pattern of names. Of
    a quantized checkpoint, ``taken_over`` counts by type the matrices that are the file's own, and ``rounded_anew``
    those that are not.
    """

    graph: str
    architecture: str
    lowering: str
    precision: str
    head_precision: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    capacity: int
    cache_dtype: str
    min_rows: int
    exactness: str
    device: str
    check: dict[str, float]
    tokenizer: str = TOKENIZER
    tensor_precision: dict[str, str] = field(default_factory=dict)
    taken_over: dict[str, int] = field(default_factory=dict)
    rounded_anew: dict[str, int] = field(default_factory=dict)
    packed_exactness: str = ABSENT

    @property
    def precisions(self) -> tuple[str, ...]:
        """All that some matrix is stored in, each once, the model's first."""
        return tuple(dict.fromkeys((self.precision, self.head_precision, *self.tensor_precision.values())))

    @property
    def resident_graph(self) -> str:
        """The graph with heads (``export/heads.py``)."""
        return PurePosixPath(self.graph).with_suffix(".resident.onnx").as_posix()

    @property
    def packed_graph(self) -> str:
        """The graph for many sequences at once (``PackedLowering`` in ``export/attention.py``), where there is one."""
        return PurePosixPath(self.graph).with_suffix(".packed.onnx").as_posix()

    @property
    def weights(self) -> str:
        return PurePosixPath(self.graph).with_name(WEIGHTS).as_posix()


@dataclass(frozen=True)
class EngineFile:
    """An engine built ahead of time.

    ``role`` is the model's (``target`` or ``draft``), ``engine`` the library's name (``tensorrt`` or ``tensorrt-rtx``)
    and ``version`` its version; ``arch`` is ``sm89`` or the like, or ``any``. ``key`` names graph, weights, engine and
    options: another key is another engine. ``plans`` are its (rows, logit rows), a profile each. ``layers`` counts the
    kinds of layers of the parsed network, ``aliases`` the outputs that share an input's memory.
    """

    file: str
    role: str
    engine: str
    version: str
    arch: str
    key: str
    plans: tuple[tuple[int, ...], ...]
    layers: dict[str, int]
    aliases: int
    weight_streaming: bool
    build_seconds: float

    @property
    def slot(self) -> tuple[str, str, str, str]:
        """What a bundle has one engine for."""
        return self.role, self.engine, self.version, self.arch


@dataclass(frozen=True)
class Manifest:
    """The bundle's table of contents. ``tiers`` are the values of K, ``max_length`` counts prompt and output tokens."""

    producer: str
    tiers: tuple[int, ...]
    max_length: int
    eos_token_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    target: ModelInfo
    draft: ModelInfo | None
    engines: tuple[EngineFile, ...] = ()

    @property
    def models(self) -> dict[str, ModelInfo]:
        """By role."""
        return {"target": self.target} | ({} if self.draft is None else {"draft": self.draft})

    @property
    def translated(self) -> bool:
        """Whether the draft has another tokenizer than the target."""
        return self.draft is not None and self.draft.tokenizer != self.target.tokenizer

    def __post_init__(self) -> None:
        if not self.tiers or list(self.tiers) != sorted(set(self.tiers)) or self.tiers[0] < 1:
            raise ValueError(f"manifest.tiers is {list(self.tiers)}")
        if self.target.capacity < self.max_length + self.tiers[-1] + 2:
            graph, capacity = self.target.graph, self.target.capacity
            raise ValueError(f"the capacity of {graph} is {capacity}, max_length {self.max_length}")


class Bundle:
    """An opened bundle: every file present, unchanged and inside the folder.

    Engines are large, and only one of them is loaded: each is checked by ``engine_path``.

    Raises:
        OutriderError: not a bundle, made by a newer version, a file missing, changed or outside the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest, self.files = _read_manifest(self.folder)
        engines = {engine.file for engine in self.manifest.engines}
        for name in self.files.keys() - engines:
            _verify_file(self.folder, name, self.files[name])
        models = self.manifest.models.values()
        parts = [part for one in models for part in (one.graph, one.resident_graph, one.weights, one.tokenizer)]
        for name in (TOKENIZER, *parts, *engines):
            if name not in self.files:
                raise OutriderError(f"{self.folder / MANIFEST} does not list {name}; export the bundle again")

    def path(self, name: str) -> Path:
        """The path of a listed file."""
        return _inside(self.folder, name)

    def engine_path(self, engine: EngineFile) -> Path:
        """The path of an engine.

        Raises:
            OutriderError: it is missing or was changed.
        """
        try:
            _verify_file(self.folder, engine.file, self.files[engine.file])
        except OutriderError as error:
            command = build_command(self.folder, engine.engine, engine.arch)
            raise OutriderError(f"{str(error).partition(';')[0]}; build it again: `{command}`") from None
        return self.path(engine.file)

    def add_engine(self, engine: EngineFile, built: Path) -> None:
        """Move a built file to its place and list it, in place of the one for the same model, library and architecture.

        The manifest is read again, since others may have built meanwhile, and replaced at once: an interrupt leaves the
        bundle as it was, with a file more at most.
        """
        path = self.path(engine.file)
        path.parent.mkdir(exist_ok=True)
        entry = {"bytes": built.stat().st_size, "sha256": sha256_of(built)}
        built.replace(path)
        with _locked(self.folder):
            manifest, files = _read_manifest(self.folder)
            old = {other.file for other in manifest.engines if other.slot == engine.slot}
            kept = tuple(other for other in manifest.engines if other.file not in old)
            self.manifest = replace(manifest, engines=(*kept, engine))
            self.files = {name: listed for name, listed in files.items() if name not in old} | {engine.file: entry}
            work = self.folder / f".{MANIFEST}.new"
            _write_record(work, self.manifest, self.files)
            work.replace(self.folder / MANIFEST)
        with suppress(OSError):
            for name in old - {engine.file}:
                self.path(name).unlink()

    @property
    def chat_template(self) -> str | None:
        return self.path(CHAT_TEMPLATE).read_text(encoding="utf-8") if CHAT_TEMPLATE in self.files else None


def write_manifest(work: Path, manifest: Manifest) -> None:
    """Write the manifest last, with size and sha256 of every file under ``work`` that is not hidden."""
    files = {
        path.relative_to(work).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(work.rglob("*"))
        if path.is_file() and not path.name.startswith(".")  # notes of the export, which go before the end
    }
    _write_record(work / MANIFEST, manifest, files)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time changes the manifest, where the system has locks of this kind."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def build_command(folder: Path, engine: str, arch: str) -> str:
    """What makes the engine of a bundle."""
    return f"outrider build {folder} --engine {engine} --arch {arch}"


def _write_record(path: Path, manifest: Manifest, files: dict[str, dict[str, Any]]) -> None:
    record = {"format": FORMAT, "version": VERSION, "manifest": asdict(manifest), "files": files}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _read_manifest(folder: Path) -> tuple[Manifest, dict[str, dict[str, Any]]]:
    """The manifest, and what it lists of each file."""
    record = _read_record(folder)
    try:
        files: dict[str, dict[str, Any]] = _parse(dict[str, dict[str, Any]], record.get("files"), "files")
        manifest: Manifest = _parse(Manifest, record.get("manifest"), "manifest")
    except ValueError as error:
        raise OutriderError(f"{folder / MANIFEST} is damaged: {error}; export the bundle again") from None
    return manifest, files


def _read_record(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not folder.is_dir():
        raise OutriderError(f"{folder} is not a folder; pass the folder that `outrider export --out` wrote")
    if not path.is_file():
        raise OutriderError(f"{folder} has no {MANIFEST}; pass the folder that `outrider export --out` wrote")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OutriderError(f"{path} is not valid JSON ({error}); export the bundle again") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise OutriderError(f"{path} is not an Outrider manifest; export the bundle again")
    if record.get("version") != VERSION:
        raise OutriderError(
            f"{path} has format version {record.get('version')}, this Outrider reads version {VERSION}; "
            "upgrade Outrider or export the bundle again"
        )
    return record


def _parse(kind: Any, value: Any, name: str) -> Any:
    """JSON ``value`` as ``kind``: a dataclass, an optional, a tuple or dict of one kind, or a plain type.

    Raises:
        ValueError: naming the field that is missing, unknown or of another kind.
    """
    origin, args = get_origin(kind) or kind, get_args(kind)
    if is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        for field in sorted(hints.keys() ^ value.keys()):
            raise ValueError(f"{name}.{field} is {'missing' if field in hints else 'unknown'}")
        return origin(**{field: _parse(hint, value[field], f"{name}.{field}") for field, hint in hints.items()})
    if type(None) in args:
        return None if value is None else _parse(args[0], value, name)
    if origin is tuple and isinstance(value, list):
        return tuple(_parse(args[0], item, name) for item in value)
    if origin is dict and isinstance(value, dict):
        return {key: _parse(args[1], item, f"{name}.{key}") for key, item in value.items()}
    if kind is Any or (kind in (str, int, float, bool) and isinstance(value, (int, float) if kind is float else kind)):
        return value
    raise ValueError(f"{name} is {value!r}")


def _inside(folder: Path, name: str) -> Path:
    """``folder / name``, refused when it would leave the folder (also through a link)."""
    pure = PurePosixPath(name)
    path = folder / name
    strange = pure.is_absolute() or ".." in pure.parts or "\0" in name
    if strange or not path.resolve().is_relative_to(folder.resolve()):
        raise OutriderError(f"{folder / MANIFEST} names {name!r}, which is outside the bundle; do not use this bundle")
    return path


def _verify_file(folder: Path, name: str, entry: dict[str, Any]) -> None:
    path = _inside(folder, name)
    if not path.is_file():
        raise OutriderError(f"{path} is missing; export the bundle again")
    if path.stat().st_size != entry.get("bytes") or sha256_of(path) != entry.get("sha256"):
        raise OutriderError(f"{path} was changed since the export (sha256 differs); export the bundle again")
