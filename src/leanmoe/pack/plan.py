"""What a pack of a GGUF model will hold, computed from the model's header alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import blake3

from leanmoe.errors import FormatError
from leanmoe.formats.consumed import unmarked
from leanmoe.formats.gguf import GGUFFile, TensorInfo, encode_header, encode_u32
from leanmoe.pack.digests import TRUNK, expert_name
from leanmoe.pack.layout import ExpertLayout
from leanmoe.pack.manifest import FILE_ALIGNMENT, LayerManifest, Manifest, SourceFile
from leanmoe.pack.slices import LayerSlices, Split, split_experts


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a file to be written: `nbytes` at `offset` of `path`, or `data`, or zeros if that is empty."""

    nbytes: int
    path: Path | None = None
    offset: int = 0
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Target:
    """A file of the pack: its name within the pack, its size, and the pieces it is made of, in order."""

    name: str
    nbytes: int
    pieces: Callable[[], Iterator[Piece]]


@dataclass(frozen=True, slots=True)
class PackPlan:
    """The manifest of a pack and the files beside it: the trunk, then every expert."""

    manifest: Manifest
    targets: tuple[Target, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all targets."""
        return sum(target.nbytes for target in self.targets)


def plan_pack(gguf: GGUFFile) -> PackPlan:
    """The plan for packing `gguf`. Raises as `split_experts`, and `FormatError` if a shard cannot be read."""
    split = split_experts(gguf)
    trunk = _trunk(gguf, split)
    layers = tuple(LayerManifest(part.layer, split.expert_count, part.layout) for part in split.layers)
    manifest = Manifest(
        architecture=gguf.architecture,
        expert_count=split.expert_count,
        expert_used_count=split.expert_used_count,
        layers=layers,
        source=tuple(map(_source_file, gguf.shards, gguf.data_starts)),
        trunk_bytes=trunk.nbytes,
        skipped=tuple(tensor.name for tensor in split.skipped),
    )
    experts = (
        Target(expert_name(part.layer, e), part.layout.file_bytes, partial(_expert_pieces, part, e))
        for part in split.layers
        for e in range(split.expert_count)
    )
    return PackPlan(manifest, (trunk, *experts))


def expert_layouts(gguf: GGUFFile) -> Manifest:
    """The manifest that a pack of `gguf` would have; reads headers only. Raises as `plan_pack`."""
    return plan_pack(gguf).manifest


def _source_file(path: Path, data_start: int) -> SourceFile:
    try:
        with path.open("rb") as file:
            digest = blake3.blake3(unmarked(file.read(data_start))).hexdigest()
        return SourceFile(path.name, path.stat().st_size, digest)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error


def _trunk(gguf: GGUFFile, split: Split) -> Target:
    """trunk.gguf: every key but split.*, every tensor of the trunk, at multiples of 4096 for direct reads."""
    pairs: dict[str, bytes | memoryview] = {
        key: raw for key, raw in gguf.raw_kv.items() if not key.startswith("split.")
    }
    pairs["general.alignment"] = encode_u32("general.alignment", FILE_ALIGNMENT)
    infos = [(tensor.name, tensor.ne, tensor.qtype) for tensor in split.trunk]
    header, _ = encode_header(list(pairs.values()), infos, FILE_ALIGNMENT)
    size = len(header) + sum(t.nbytes + -t.nbytes % FILE_ALIGNMENT for t in split.trunk)
    return Target(TRUNK, size, partial(_trunk_pieces, header, split.trunk))


def _trunk_pieces(header: bytes, tensors: tuple[TensorInfo, ...]) -> Iterator[Piece]:
    yield Piece(len(header), data=header)
    for tensor in tensors:
        yield Piece(tensor.nbytes, tensor.path, tensor.offset)
        yield Piece(-tensor.nbytes % FILE_ALIGNMENT)


def _expert_pieces(part: LayerSlices, expert: int) -> Iterator[Piece]:
    layout: ExpertLayout = part.layout
    end = 0
    for name, section in layout.sections.items():
        piece = part.slices[name]
        yield Piece(section.offset - end)
        yield Piece(piece.nbytes, piece.tensor.path, piece.offset(expert))
        end = section.offset + section.nbytes
    yield Piece(layout.file_bytes - end)
