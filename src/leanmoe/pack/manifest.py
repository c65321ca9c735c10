"""The manifest of a pack: what it holds and where the parts of an expert's file lie. See docs/format.md.

A manifest that was read from a file has been checked completely: every count, offset, size and name in it is
within bounds and consistent with the others.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from leanmoe.errors import FormatError, UnsupportedError
from leanmoe.formats.quant_types import quant_type
from leanmoe.pack.layout import ExpertLayout, Section

FORMAT = "lmpack"
VERSION = 1
SECTION_ALIGNMENT = 64
FILE_ALIGNMENT = 4096
LAYOUTS = frozenset({"canonical"})
WEIGHTS = ("gate", "up", "down")
SECTION_NAMES = (*WEIGHTS, *(f"{w}_bias" for w in WEIGHTS), *(f"{w}_scale" for w in WEIGHTS))

MAX_MANIFEST_BYTES = 64 << 20
MAX_LAYERS = 4096
MAX_EXPERTS = 1 << 16
MAX_EXPERT_FILES = 1 << 20
MAX_BYTES = 1 << 48
MAX_DIMENSION = 1 << 32


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file the pack was made from: its name without a directory, its size, the digest of its header."""

    name: str
    nbytes: int
    header_digest: str


@dataclass(frozen=True, slots=True)
class LayerManifest:
    """One layer with routed experts: its index in the model, their number, the layout of each file."""

    layer: int
    expert_count: int
    layout: ExpertLayout


@dataclass(frozen=True, slots=True)
class Manifest:
    """The facts about a pack. `layers` are those with routed experts, ascending; none for a dense model.

    `trunk_bytes` is the size of trunk.gguf; `skipped` names the source's tensors that the pack leaves out
    (blocks for multi-token prediction).
    """

    architecture: str
    expert_count: int
    expert_used_count: int
    layers: tuple[LayerManifest, ...]
    source: tuple[SourceFile, ...]
    trunk_bytes: int
    skipped: tuple[str, ...] = ()
    version: int = VERSION

    @property
    def expert_files(self) -> int:
        """How many expert files the pack has."""
        return sum(layer.expert_count for layer in self.layers)

    @property
    def expert_bytes(self) -> int:
        """The bytes of all expert files together."""
        return sum(layer.expert_count * layer.layout.file_bytes for layer in self.layers)

    def to_json(self) -> bytes:
        """The manifest as the bytes of manifest.json; the same manifest always gives the same bytes."""
        layers = [
            {
                "layer": layer.layer,
                "experts": layer.expert_count,
                "file_bytes": layer.layout.file_bytes,
                "sections": {
                    name: {
                        "type": section.qtype.name,
                        "shape": list(section.shape),
                        "offset": section.offset,
                        "bytes": section.nbytes,
                        "layout": section.layout,
                    }
                    for name, section in layer.layout.sections.items()
                },
            }
            for layer in self.layers
        ]
        files = [{"name": f.name, "bytes": f.nbytes, "header_blake3": f.header_digest} for f in self.source]
        document = {
            "format": FORMAT,
            "version": self.version,
            "architecture": self.architecture,
            "expert_count": self.expert_count,
            "expert_used_count": self.expert_used_count,
            "source": {"files": files},
            "trunk": {"bytes": self.trunk_bytes},
            "skipped": list(self.skipped),
            "layers": layers,
        }
        return (json.dumps(document, indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, text: bytes, path: Path) -> "Manifest":
        """The manifest in `text`, read from `path` (named in errors).

        Raises `FormatError` for anything malformed, out of bounds or inconsistent, and `UnsupportedError` for
        a newer version, an unknown tensor type or an unknown layout.
        """
        top = _Fields(path, "the manifest", _parse(text, path))
        if top.text("format") != FORMAT:
            raise top.error(f"format is {top.text('format')!r}; {FORMAT!r} was wanted")
        version = top.integer("version", 1, 1 << 31)
        if version > VERSION:
            raise UnsupportedError(
                f"{path}: pack format version {version}; this lean reads up to {VERSION}: "
                "update lean, or pack again"
            )
        expert_count = top.integer("expert_count", 0, MAX_EXPERTS)
        layers = tuple(_layer(item, expert_count) for item in top.objects("layers", MAX_LAYERS))
        for before, after in pairwise(layers):
            if after.layer <= before.layer:
                raise top.error(
                    f"layer {after.layer} is listed after layer {before.layer}; each once, ascending"
                )
        if len(layers) * expert_count > MAX_EXPERT_FILES:
            raise top.error(
                f"{len(layers)} layers of {expert_count} experts; at most {MAX_EXPERT_FILES} files"
            )
        files = tuple(_source_file(item) for item in top.object("source").objects("files", MAX_EXPERTS))
        skipped = top.items("skipped", 1 << 17)
        if not all(isinstance(name, str) for name in skipped):
            raise top.error("skipped has an entry that is not a string")
        return cls(
            architecture=top.text("architecture"),
            expert_count=expert_count,
            expert_used_count=top.integer("expert_used_count", 1 if layers else 0, expert_count),
            layers=layers,
            source=files,
            trunk_bytes=top.object("trunk").integer("bytes", 1, MAX_BYTES),
            skipped=tuple(skipped),
            version=version,
        )


@dataclass(frozen=True, slots=True)
class _Fields:
    """A JSON object whose fields are taken out with their types and bounds checked."""

    path: Path
    where: str
    values: Mapping[str, Any]

    def error(self, what: str) -> FormatError:
        return FormatError(f"{self.path}: {self.where}: {what}")

    def get(self, key: str) -> Any:
        if key not in self.values:
            raise self.error(f"'{key}' is missing")
        return self.values[key]

    def integer(self, key: str, low: int, high: int) -> int:
        value = self.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self.error(f"{key} is {_short(value)}; an integer from {low} to {high} was wanted")
        return value

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str) or not 0 < len(value) <= 1024:
            raise self.error(f"{key} is {_short(value)}; a string was wanted")
        return value

    def items(self, key: str, limit: int) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list) or len(value) > limit:
            raise self.error(f"{key} is {_short(value)}; a list of at most {limit} was wanted")
        return value

    def object(self, key: str) -> "_Fields":
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.error(f"{key} is {_short(value)}; an object was wanted")
        return _Fields(self.path, f"{self.where}, {key}", value)

    def objects(self, key: str, limit: int) -> list["_Fields"]:
        items = self.items(key, limit)
        for value in items:
            if not isinstance(value, dict):
                raise self.error(f"{key} has {_short(value)}; an object was wanted")
        return [_Fields(self.path, f"{self.where}, {key}[{i}]", value) for i, value in enumerate(items)]


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a huge number"
    return text if len(text) <= 60 else text[:60] + "..."


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    def no_constant(name: str) -> None:
        raise ValueError(f"{name} is not a number of JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise ValueError("a field appears twice in one object")
        return result

    if len(text) > MAX_MANIFEST_BYTES:
        raise FormatError(f"{path}: {len(text)} bytes long; a manifest has at most {MAX_MANIFEST_BYTES}")
    try:
        document = json.loads(text, parse_constant=no_constant, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise FormatError(f"{path}: holds {_short(document)}; an object was wanted")
    return document


def _source_file(fields: _Fields) -> SourceFile:
    name = fields.text("name")
    if "/" in name or "\0" in name or name in (".", ".."):
        raise fields.error(f"name is {_short(name)}; a file name without a directory was wanted")
    digest = fields.text("header_blake3")
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise fields.error(f"header_blake3 is {_short(digest)}; 64 hexadecimal digits were wanted")
    return SourceFile(name, fields.integer("bytes", 1, MAX_BYTES), digest)


def _layer(fields: _Fields, expert_count: int) -> LayerManifest:
    index = fields.integer("layer", 0, MAX_LAYERS - 1)
    experts = fields.integer("experts", 1, MAX_EXPERTS)
    if experts != expert_count:
        raise fields.error(f"has {experts} experts; expert_count is {expert_count}")
    file_bytes = fields.integer("file_bytes", FILE_ALIGNMENT, MAX_BYTES)
    if file_bytes % FILE_ALIGNMENT:
        raise fields.error(f"file_bytes is {file_bytes}, not a multiple of {FILE_ALIGNMENT}")
    parts = fields.object("sections")
    unknown = sorted(set(parts.values) - set(SECTION_NAMES))
    if unknown:
        raise fields.error(f"has the unknown section {_short(unknown[0])}; known: {', '.join(SECTION_NAMES)}")
    sections = {name: _section(parts.object(name)) for name in parts.values}
    _check_shapes(fields, sections)
    end, before = 0, ""
    for name, section in sorted(sections.items(), key=lambda item: item[1].offset):
        if section.offset < end:
            raise fields.error(
                f"section '{name}' at {section.offset} overlaps '{before}', which ends at {end}"
            )
        end, before = section.offset + section.nbytes, name
    if end > file_bytes:
        raise fields.error(f"section '{before}' ends at {end}, but the file has {file_bytes} bytes")
    return LayerManifest(index, experts, ExpertLayout(sections, file_bytes))


def _section(fields: _Fields) -> Section:
    try:
        qtype = quant_type(fields.text("type"))
    except UnsupportedError as error:
        raise UnsupportedError(f"{fields.path}: {fields.where}: {error}") from None
    layout = fields.text("layout")
    if layout not in LAYOUTS:
        raise UnsupportedError(
            f"{fields.path}: {fields.where}: layout {_short(layout)} is unknown; this lean knows "
            f"{', '.join(sorted(LAYOUTS))}: update lean, or pack again"
        )
    shape = tuple(fields.items("shape", 2))
    if not shape or not all(type(n) is int and 1 <= n <= MAX_DIMENSION for n in shape):
        raise fields.error(f"shape is {_short(list(shape))}; one or two positive integers were wanted")
    offset, nbytes = fields.integer("offset", 0, MAX_BYTES), fields.integer("bytes", 1, MAX_BYTES)
    if offset % SECTION_ALIGNMENT:
        raise fields.error(f"offset is {offset}, not a multiple of {SECTION_ALIGNMENT}")
    try:
        wanted = section_bytes(qtype.row_bytes(shape[-1]), shape)
    except FormatError as error:
        raise fields.error(str(error)) from None
    if nbytes != wanted:
        raise fields.error(f"bytes is {nbytes}; {qtype.name} of shape {list(shape)} takes {wanted}")
    return Section(qtype, shape, offset, nbytes, layout)


def section_bytes(row_bytes: int, shape: tuple[int, ...]) -> int:
    """The bytes of a tensor of torch `shape` (one or two dimensions) whose rows take `row_bytes`."""
    return row_bytes * (shape[0] if len(shape) == 2 else 1)


def _check_shapes(fields: _Fields, sections: Mapping[str, Section]) -> None:
    """Gate and up are (F, D), down is (D, F), a bias has its weight's rows, a scale one element."""
    missing = [name for name in WEIGHTS if name not in sections]
    if missing:
        raise fields.error(f"section '{missing[0]}' is missing")
    wanted = expected_shapes(sections["gate"].shape)
    for name, section in sections.items():
        if section.shape != wanted[name]:
            raise fields.error(
                f"section '{name}' has shape {list(section.shape)}; "
                f"beside gate {list(sections['gate'].shape)} {list(wanted[name])} was wanted"
            )


def expected_shapes(gate: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The torch shape of each section of an expert whose gate has shape `gate`, (F, D)."""
    f, d = gate if len(gate) == 2 else (0, 0)
    shapes: dict[str, tuple[int, ...]] = {"gate": (f, d), "up": (f, d), "down": (d, f)}
    shapes |= {"gate_bias": (f,), "up_bias": (f,), "down_bias": (d,)}
    return shapes | {f"{weight}_scale": (1,) for weight in WEIGHTS}
