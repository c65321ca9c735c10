"""Freeing a source file piece by piece while it is packed: holes are punched where it was copied."""

import ctypes
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from leanmoe.errors import UsageError
from leanmoe.formats.consumed import HEAD_BYTES, consumer_of, marked

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_PAGE = 4096
_PROBE_BYTES = 16 * _PAGE

Range = tuple[Path, int, int]


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Frees the blocks of these bytes, which then read as zeros; the file keeps its size. `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def mark(fd: int, path: Path, consumer: int) -> None:
    """Marks the open GGUF file `path` as being freed by `consumer`, durably, so that nobody takes it for whole.

    Raises `UsageError` if another is freeing it, and `OSError`.
    """
    head = os.pread(fd, HEAD_BYTES, 0)
    if (found := consumer_of(head)) is None:
        os.pwrite(fd, marked(head, consumer), 0)
        os.fsync(fd)
    elif found != consumer:
        raise UsageError(
            f"{path}: another lean pack --consume has begun to free it; give the name of that pack"
        )


def is_marked(path: Path, consumer: int) -> bool:
    """Whether there is a file `path` that bears the mark of `consumer`. Raises `OSError`."""
    try:
        with path.open("rb") as file:
            return consumer_of(file.read(HEAD_BYTES)) == consumer
    except FileNotFoundError:
        return False


def check_consumable(shards: Iterable[Path]) -> None:
    """Raises `UsageError`, naming the file, unless `shards` can be freed while packed, and deleted."""
    shards = tuple(shards)
    for shard in shards:
        info = shard.lstat()
        if shard.is_symlink():
            raise UsageError(f"{shard}: is a link to {shard.resolve()}; --consume needs the file itself")
        if info.st_nlink > 1:
            raise UsageError(f"{shard}: has {info.st_nlink} hard links; --consume would empty all of them")
        if not os.access(shard, os.W_OK) or not os.access(shard.parent, os.W_OK):
            raise UsageError(
                f"{shard}: --consume must write and delete it; make it and its directory writable"
            )
    for directory in {shard.parent for shard in shards}:
        try:
            with tempfile.TemporaryFile(dir=directory) as probe:
                probe.write(bytes(_PROBE_BYTES))
                probe.flush()
                punch(probe.fileno(), 0, _PROBE_BYTES)
        except OSError as error:
            raise UsageError(
                f"{directory}: its file system cannot free parts of a file ({error.strerror}); "
                "pack without --consume"
            ) from error


def whole_pages(ranges: Iterable[Range]) -> list[Range]:
    """`ranges` (path, start, end) joined where they touch, then shrunk to whole pages; none is empty."""
    joined: list[Range] = []
    for path, start, end in sorted(ranges):
        if joined and joined[-1][0] == path and start <= joined[-1][2]:
            joined[-1] = (path, joined[-1][1], max(end, joined[-1][2]))
        else:
            joined.append((path, start, end))
    pages = ((path, -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE) for path, start, end in joined)
    return [(path, start, end) for path, start, end in pages if start < end]
