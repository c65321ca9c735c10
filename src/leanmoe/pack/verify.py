"""Compares every file of a pack with its digest and reports all faults at once."""

import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import blake3

from leanmoe.errors import LeanError
from leanmoe.formats.io import open_direct
from leanmoe.pack.copier import PackProgress, ProgressCallback
from leanmoe.pack.digests import DIGESTS, EXPERTS, MANIFEST, TRUNK, expert_name, read_digests
from leanmoe.pack.manifest import Manifest
from leanmoe.pack.reader import check_is_pack, load_manifest

_CHUNK = 2 << 20
_READERS = 8


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong with one file of a pack. `name`: its path within the pack; `what`: what was found."""

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


def verify_pack(path: Path | str, progress: ProgressCallback | None = None) -> list[Fault]:
    """All faults of the pack in directory `path`; none if every byte is as it was written.

    A file may be missing, of the wrong size, altered, in the place of another, unreadable or unexpected.
    Raises `UsageError` if `path` is no pack. Every file is read once, past the page cache where possible.
    """
    path = Path(path)
    check_is_pack(path)
    try:
        digests = read_digests(path / DIGESTS)
    except (LeanError, OSError) as error:
        return [Fault(DIGESTS, f"nothing can be verified without it: {error}")]
    faults: list[Fault] = []
    sizes: dict[str, int] = {}
    try:
        manifest = load_manifest(path)
        sizes = _expected_sizes(manifest)
        faults += [Fault(name, f"has no digest in {DIGESTS}") for name in sizes if name not in digests]
    except (LeanError, OSError) as error:
        faults.append(Fault(MANIFEST, str(error)))
    faults += _check_contents(path, digests, sizes, progress)
    faults += [Fault(name, "unexpected file") for name in _files_under(path, EXPERTS) if name not in digests]
    return faults


def _expected_sizes(manifest: Manifest) -> dict[str, int]:
    sizes = {TRUNK: manifest.trunk_bytes}
    for layer in manifest.layers:
        for expert in range(layer.expert_count):
            sizes[expert_name(layer.layer, expert)] = layer.layout.file_bytes
    return sizes


def _check_contents(
    path: Path, digests: Mapping[str, bytes], sizes: Mapping[str, int], progress: ProgressCallback | None
) -> Iterator[Fault]:
    owners = {digest: name for name, digest in digests.items()}
    total = sum(sizes.values())
    done = 0
    with ExitStack() as stack:
        buffers: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(_READERS):  # page-aligned, as direct reads want
            buffers.put(stack.enter_context(memoryview(stack.enter_context(mmap.mmap(-1, _CHUNK)))))
        readers = stack.enter_context(ThreadPoolExecutor(_READERS))
        stack.callback(readers.shutdown, cancel_futures=True)  # an interrupt does not wait for the rest

        def check(name: str) -> str | None:
            return _check_file(path / name, digests[name], sizes.get(name), owners, buffers)

        for name, what in zip(digests, readers.map(check, digests), strict=True):
            if what is not None:
                yield Fault(name, what)
            done += sizes.get(name, 0)
            if progress is not None:
                progress(PackProgress(done, total, name))


def _check_file(
    path: Path,
    wanted: bytes,
    wanted_size: int | None,
    owners: Mapping[bytes, str],
    buffers: SimpleQueue[memoryview],
) -> str | None:
    """What is wrong with one file, if anything."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            return "not a regular file"
        size = found.st_size
        if wanted_size is not None and size != wanted_size:
            return f"{size} bytes long; {wanted_size} were wanted"
        buffer = buffers.get()
        try:
            digest = _digest(path, buffer)
        finally:
            buffers.put(buffer)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if digest == wanted:
        return None
    if digest in owners:
        return f"holds the bytes of {owners[digest]}"
    return "altered: its contents do not match its digest"


def _digest(path: Path, buffer: memoryview) -> bytes:
    hasher = blake3.blake3()
    with open_direct(path) as file:
        at = 0
        while got := os.preadv(file.fd, [buffer], at):
            hasher.update(buffer[:got])
            file.consumed(at, got)
            at += got
            if got % mmap.PAGESIZE:  # the end of a file that is no whole number of pages
                break
    return hasher.digest()


def _files_under(path: Path, directory: str) -> list[str]:
    found = []
    for parent, _, files in os.walk(path / directory):
        found += [(Path(parent) / name).relative_to(path).as_posix() for name in files]
    return sorted(found)
