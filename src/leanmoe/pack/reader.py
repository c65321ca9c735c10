"""Opens a pack, after checking that it is complete and consistent."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import blake3

from leanmoe.errors import FormatError, UsageError
from leanmoe.formats.gguf import GGUFFile, read_gguf
from leanmoe.formats.io import read_small_file
from leanmoe.pack.digests import DIGESTS, MANIFEST, TRUNK, expert_name, read_digests
from leanmoe.pack.manifest import MAX_MANIFEST_BYTES, LayerManifest, Manifest

AGAIN = "delete the pack and make it again with: lean pack FILE.gguf"
"""What helps against a damaged pack."""


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """An open pack: its manifest, the header of its trunk, and the digest of every file."""

    path: Path
    manifest: Manifest
    trunk: GGUFFile
    digests: Mapping[str, bytes]

    def expert_path(self, layer: int, expert: int) -> Path:
        """The file of one expert."""
        return self.path / expert_name(layer, expert)

    def expert_digest(self, layer: int, expert: int) -> bytes:
        """The 32-byte blake3 digest of one expert's file."""
        return self.digests[expert_name(layer, expert)]

    @property
    def trunk_digest(self) -> bytes:
        """The 32-byte blake3 digest of trunk.gguf."""
        return self.digests[TRUNK]


def open_pack(path: Path | str) -> Pack:
    """Opens the pack in directory `path`. Checks everything but the contents of the trunk and the experts:
    the manifest, the trunk's header, that the list of digests is complete, and the size of every file.

    Raises `UsageError` if `path` is no pack, `FormatError` for one that is damaged, and `UnsupportedError`
    for one written by a newer lean. Each names the file.
    """
    path = Path(path)
    check_is_pack(path)
    try:
        manifest = load_manifest(path)
        digests = read_digests(path / DIGESTS)
        _check_digests(path, manifest, digests)
        for layer in manifest.layers:
            _check_files(path, layer)
        trunk = _open_trunk(path, manifest)
    except OSError as error:
        raise FormatError(f"{error.filename or path}: cannot be read: {error.strerror}; {AGAIN}") from error
    return Pack(path, manifest, trunk, digests)


def is_pack(path: Path) -> bool:
    """Whether `path` is a finished pack, as far as its name list tells."""
    return (path / MANIFEST).is_file()


def names_pack(path: Path) -> bool:
    """Whether `path` is meant as a pack: a directory, or the name of a pack that is not finished."""
    return path.is_dir() or (not path.exists() and path.with_name(path.name + ".partial").is_dir())


def check_is_pack(path: Path) -> None:
    """Raises `UsageError` or `FormatError`, saying what to do, unless `path` looks like a finished pack."""
    if path.is_file():
        if path.suffix == ".gguf":
            raise UsageError(f"{path}: is a GGUF file, not a pack; make one with: lean pack {path}")
        raise UsageError(f"{path}: is a file; a pack is a directory NAME.lmpack made by: lean pack FILE.gguf")
    if not path.is_dir():
        partial = path.with_name(path.name + ".partial")
        if partial.is_dir():
            raise UsageError(
                f"{path}: packing was not finished ({partial.name}); run lean pack again to resume"
            )
        raise UsageError(f"{path}: no such pack; make one with: lean pack FILE.gguf")
    if path.suffix == ".partial":
        raise UsageError(f"{path}: packing was not finished; run lean pack again to resume")
    if not (path / MANIFEST).is_file():
        if (path / "config.json").is_file():
            raise UsageError(
                f"{path}: is a checkpoint, not a pack; make one with: lean pack {path} --quant q4_k_m"
            )
        raise FormatError(
            f"{path}: has no {MANIFEST}, so it is not a pack; make one with: lean pack FILE.gguf"
        )


def load_manifest(path: Path) -> Manifest:
    """The manifest of the pack in `path`, checked in itself. Raises as `Manifest.from_json`, or `OSError`."""
    file = path / MANIFEST
    return Manifest.from_json(read_small_file(file, MAX_MANIFEST_BYTES), file)


def _check_digests(path: Path, manifest: Manifest, digests: Mapping[str, bytes]) -> None:
    """The list has the manifest's own digest, and one for the trunk and each expert, and no other."""
    file = path / DIGESTS
    wanted = manifest.expert_files + 2
    if len(digests) != wanted:
        raise FormatError(f"{file}: lists {len(digests)} files; the manifest has {wanted}; {AGAIN}")
    experts = ((layer.layer, expert) for layer in manifest.layers for expert in range(layer.expert_count))
    for name in (MANIFEST, TRUNK, *(expert_name(*pair) for pair in experts)):
        if name not in digests:
            raise FormatError(f"{file}: has no digest for {name}; {AGAIN}")
    if blake3.blake3((path / MANIFEST).read_bytes()).digest() != digests[MANIFEST]:
        raise FormatError(
            f"{path / MANIFEST}: does not match its digest in {DIGESTS}; it was altered: {AGAIN}"
        )


def _check_files(path: Path, layer: LayerManifest) -> None:
    """Every expert file of `layer` is there, with the right size."""
    directory = (path / expert_name(layer.layer, 0)).parent
    with os.scandir(directory) as entries:
        sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    for expert in range(layer.expert_count):
        file = path / expert_name(layer.layer, expert)
        size = sizes.get(file.name)
        if size is None:
            raise FormatError(f"{file}: missing; lean verify lists every fault")
        if size != layer.layout.file_bytes:
            raise FormatError(
                f"{file}: {size} bytes long; the manifest says {layer.layout.file_bytes}; "
                "lean verify lists every fault"
            )


def _open_trunk(path: Path, manifest: Manifest) -> GGUFFile:
    file = path / TRUNK
    size = file.stat().st_size
    if size != manifest.trunk_bytes:
        raise FormatError(f"{file}: {size} bytes long; the manifest says {manifest.trunk_bytes}; {AGAIN}")
    trunk = read_gguf(file)
    if trunk.architecture != manifest.architecture:
        raise FormatError(
            f"{file}: its architecture is {trunk.architecture}; the manifest says {manifest.architecture}"
        )
    return trunk
