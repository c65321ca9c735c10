"""Writes a pack back to one GGUF file: the trunk's tensors and the stacked experts, byte for byte."""

import errno
import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import blake3
import numpy as np

from leanmoe.errors import BudgetError, FormatError, UsageError
from leanmoe.formats.gguf import GGUFFile, encode_header, encode_u32
from leanmoe.formats.gguf_header import DEFAULT_ALIGNMENT, TensorInfo
from leanmoe.formats.gguf_values import encode_pair
from leanmoe.formats.quant_types import QuantType
from leanmoe.pack.copier import CHUNK, PackProgress, ProgressCallback, sync_directory
from leanmoe.pack.digests import TRUNK, expert_name
from leanmoe.pack.manifest import LayerManifest
from leanmoe.pack.reader import Pack, open_pack
from leanmoe.pack.source import read_at
from leanmoe.units import format_bytes

_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class _Stack:
    """One section of all experts of a layer, as the tensor that it came from."""

    layer: LayerManifest
    section: str

    @property
    def name(self) -> str:
        part, _, kind = self.section.partition("_")
        return f"blk.{self.layer.layer}.ffn_{part}_exps.{kind or 'weight'}"

    @property
    def ne(self) -> tuple[int, ...]:
        shape = self.layer.layout.sections[self.section].shape
        inner = () if self.section.endswith("_scale") else shape[::-1]
        return (*inner, self.layer.expert_count)

    @property
    def qtype(self) -> QuantType:
        return self.layer.layout.sections[self.section].qtype

    @property
    def nbytes(self) -> int:
        return self.layer.layout.sections[self.section].nbytes * self.layer.expert_count


def export_gguf(path: Path | str, out: Path | str, *, progress: ProgressCallback | None = None) -> Path:
    """Writes the pack in directory `path` to the GGUF file `out`, and returns `out`.

    Every file of the pack is compared with its digest on the way. Written under another name and renamed last.
    Raises `UsageError` if `out` exists, `BudgetError` if the disk is too small, `FormatError` for a damaged pack.
    """
    pack, out = open_pack(path), Path(out)
    if os.path.lexists(out):
        raise UsageError(f"{out}: already exists; delete it, or give another name")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such directory; {out.name} was to be written there")
    tensors = list(_tensors(pack))
    infos = [(tensor.name, tensor.ne, tensor.qtype) for tensor in tensors]
    header, offsets = encode_header(_pairs(pack), infos, DEFAULT_ALIGNMENT)
    size = len(header) + offsets[-1] + -(-tensors[-1].nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    space = os.statvfs(out.parent)
    if size > space.f_bavail * space.f_frsize:
        raise BudgetError(
            f"{out.parent}: the GGUF takes {format_bytes(size)} ({size} bytes), more than is free"
        )
    partial = out.with_name(out.name + ".partial")
    try:
        with _claimed(partial) as fd:
            places = {tensor.name: len(header) + at for tensor, at in zip(tensors, offsets, strict=True)}
            _Writer(pack, fd, places, progress).write(header, size)
            if os.path.lexists(out):
                raise UsageError(f"{out}: was made meanwhile by somebody else; give another name")
            os.rename(partial, out)
        sync_directory(out.parent)
    except OSError as error:
        kind = BudgetError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else UsageError
        raise kind(f"{error.filename or partial}: exporting stopped: {error.strerror}") from error
    return out


@contextmanager
def _claimed(partial: Path) -> Iterator[int]:
    """An empty file that nobody else writes to; deleted if the block fails. Raises `UsageError`, `OSError`."""
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not partial.exists() or not os.path.samestat(partial.stat(), os.fstat(fd)):
                raise BlockingIOError  # it was finished, or given up, between the two steps
        except BlockingIOError:
            raise UsageError(f"{partial}: another lean export is writing it; wait for it to finish") from None
        try:
            os.ftruncate(fd, 0)
            yield fd
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    finally:
        os.close(fd)


def _tensors(pack: Pack) -> Iterator[TensorInfo | _Stack]:
    """The trunk's tensors in order, and each layer's experts after the last other tensor of their block."""
    trunk = list(pack.trunk.tensors.values())
    last = {_block(tensor.name): index for index, tensor in enumerate(trunk)}
    waiting = {layer.layer: layer for layer in pack.manifest.layers}
    for index, tensor in enumerate(trunk):
        yield tensor
        block = _block(tensor.name)
        if block is not None and last[block] == index and block in waiting:
            yield from _stacks(waiting.pop(block))
    for layer in waiting.values():
        yield from _stacks(layer)


def _block(name: str) -> int | None:
    match = _BLOCK.match(name)
    return int(match[1]) if match else None


def _stacks(layer: LayerManifest) -> Iterator[_Stack]:
    return (_Stack(layer, section) for section in layer.layout.sections)


def _pairs(pack: Pack) -> list[bytes | memoryview]:
    """The trunk's key-value pairs, in order, but for the alignment, which is GGUF's default again; and, where blocks
    for multi-token prediction were left out, for their number and what is listed by block."""
    pairs: dict[str, bytes | memoryview] = dict(pack.trunk.raw_kv)
    pairs["general.alignment"] = encode_u32("general.alignment", DEFAULT_ALIGNMENT)
    if pack.manifest.skipped:
        pairs |= _without_skipped(pack.trunk)
    return list(pairs.values())


def _without_skipped(trunk: GGUFFile) -> dict[str, bytes]:
    arch = trunk.architecture
    blocks = trunk.integer(f"{arch}.block_count")
    left = blocks - trunk.integer(f"{arch}.nextn_predict_layers", 0)
    changed = {f"{arch}.block_count": left, f"{arch}.nextn_predict_layers": 0}
    pairs = {key: encode_u32(key, value) for key, value in changed.items() if key in trunk.metadata}
    for key, value in trunk.metadata.items():
        if key.startswith(f"{arch}.") and isinstance(value, np.ndarray) and len(value) == blocks:
            pairs[key] = encode_pair(key, value[:left].tolist())
    return pairs


class _Writer:
    """Fills the open file `fd` from the files of `pack`; `places` has where each tensor's data starts."""

    def __init__(
        self, pack: Pack, fd: int, places: Mapping[str, int], progress: ProgressCallback | None
    ) -> None:
        self.pack, self.fd, self.places, self.progress = pack, fd, places, progress
        self.done, self.total = 0, pack.manifest.trunk_bytes + pack.manifest.expert_bytes

    def write(self, header: bytes, size: int) -> None:
        """Writes everything and syncs it. Raises `OSError`, and `FormatError` for a file that is not as packed."""
        self._put(memoryview(header), 0)
        trunk = self.pack.trunk.path
        ranges = [
            (tensor.offset, tensor.nbytes, self.places[tensor.name])
            for tensor in self.pack.trunk.tensors.values()
        ]
        self._copy(trunk, self.pack.manifest.trunk_bytes, self.pack.trunk_digest, ranges, TRUNK)
        for layer in self.pack.manifest.layers:
            sections = layer.layout.sections
            starts = {stack.section: self.places[stack.name] for stack in _stacks(layer)}
            for expert in range(layer.expert_count):
                parts = [
                    (section.offset, section.nbytes, starts[name] + expert * section.nbytes)
                    for name, section in sections.items()
                ]
                path, digest = (
                    self.pack.expert_path(layer.layer, expert),
                    self.pack.expert_digest(layer.layer, expert),
                )
                self._copy(path, layer.layout.file_bytes, digest, parts, expert_name(layer.layer, expert))
        os.ftruncate(self.fd, size)
        os.fsync(self.fd)

    def _copy(
        self, path: Path, nbytes: int, digest: bytes, ranges: Sequence[tuple[int, int, int]], name: str
    ) -> None:
        """Copies `ranges` (offset, bytes, place in the output) of `path`, all of which is read once and digested."""
        hasher = blake3.blake3()
        buffer = memoryview(bytearray(min(CHUNK, nbytes)))
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for at in range(0, nbytes, CHUNK):
                chunk = buffer[: min(CHUNK, nbytes - at)]
                read_at(fd, path, at, chunk)
                hasher.update(chunk)
                for offset, length, place in ranges:
                    begin, end = max(offset, at), min(offset + length, at + len(chunk))
                    if begin < end:
                        self._put(chunk[begin - at : end - at], place + begin - offset)
                self.done += len(chunk)
                if self.progress is not None:
                    self.progress(PackProgress(self.done, self.total, name))
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        if hasher.digest() != digest:
            raise FormatError(f"{path}: does not match its digest; lean verify lists every fault")

    def _put(self, data: memoryview, place: int) -> None:
        while data:
            count = os.pwrite(self.fd, data, place)
            data, place = data[count:], place + count
