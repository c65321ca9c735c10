"""Where the bytes of a pack come from: the files of a GGUF model, or a model that is converted as it is read."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import blake3

from leanmoe.errors import FormatError, UsageError
from leanmoe.formats.consumed import unmarked
from leanmoe.formats.gguf import GGUFFile
from leanmoe.pack.consume import check_consumable, mark, punch
from leanmoe.pack.manifest import SourceFile


class Reader(Protocol):
    """An open source. `path` and `offset` are those of the tensors of the source's `gguf`."""

    def read(self, path: Path, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with the bytes from `offset` on. Raises `FormatError` naming the file."""

    def done(self, path: Path, offset: int, nbytes: int) -> None:
        """Says that these bytes are not needed in memory any more."""

    def free(self, path: Path, offset: int, nbytes: int) -> None:
        """Frees these bytes' room on the disk; only called of a source whose `check_consumable` passed."""


class Source(Protocol):
    """A model that can be packed: `gguf` is its header as GGUF, `files` the files it is made from."""

    @property
    def gguf(self) -> GGUFFile: ...

    @property
    def files(self) -> tuple[Path, ...]: ...

    def describe(self) -> tuple[SourceFile, ...]:
        """Names, sizes and digests of `files`, for the manifest. Raises `FormatError`."""

    def check_consumable(self) -> None:
        """Raises `UsageError` unless the source's bytes can be freed while it is packed."""

    def open(self, consumer: int | None) -> AbstractContextManager[Reader]:
        """Opens the files, for writing too if `consumer` is to free them.

        Raises `OSError`, and `UsageError` if another process is freeing them.
        """


class GGUFSource:
    """The files of a GGUF model, whose bytes are copied as they are."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf

    @property
    def files(self) -> tuple[Path, ...]:
        return self.gguf.shards

    def describe(self) -> tuple[SourceFile, ...]:
        """Each shard with the digest of its header."""
        return tuple(map(describe_file, self.gguf.shards, self.gguf.data_starts))

    def check_consumable(self) -> None:
        """Raises `UsageError` unless every shard can be freed piece by piece, and deleted."""
        check_consumable(self.gguf.shards)

    @contextmanager
    def open(self, consumer: int | None) -> Iterator[Reader]:
        """Opens every shard."""
        flags = os.O_CLOEXEC | (os.O_RDONLY if consumer is None else os.O_RDWR)
        with ExitStack() as stack:
            fds = {}
            for shard in self.gguf.shards:
                fds[shard] = os.open(shard, flags)
                stack.callback(os.close, fds[shard])
                if consumer is not None:
                    _lock(fds[shard], shard)
            yield _FileReader(fds, consumer)


class _FileReader:
    """Bytes of open files. Borrows the descriptors."""

    def __init__(self, fds: dict[Path, int], consumer: int | None) -> None:
        self._fds, self._consumer = fds, consumer
        self._marked = False

    def read(self, path: Path, offset: int, buffer: memoryview) -> None:
        read_at(self._fds[path], path, offset, buffer)

    def done(self, path: Path, offset: int, nbytes: int) -> None:
        os.posix_fadvise(self._fds[path], offset, nbytes, os.POSIX_FADV_DONTNEED)

    def free(self, path: Path, offset: int, nbytes: int) -> None:
        assert self._consumer is not None
        if not self._marked:  # all shards, each on disk before the first hole
            for shard, fd in self._fds.items():
                mark(fd, shard, self._consumer)
            self._marked = True
        punch(self._fds[path], offset, nbytes)


def _lock(fd: int, shard: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{shard}: another lean pack is consuming it; wait for it to finish") from None


def read_at(fd: int, path: Path, offset: int, buffer: memoryview) -> None:
    """Fills `buffer` from byte `offset` of the open file `path`. Raises `FormatError` if it ends before."""
    got, nbytes = 0, len(buffer)
    while got < nbytes:
        try:
            count = os.preadv(fd, [buffer[got:]], offset + got)
        except OSError as error:
            raise FormatError(f"{path}: reading at byte {offset + got} failed: {error.strerror}") from error
        if count == 0:
            raise FormatError(
                f"{path}: ends at byte {offset + got}; bytes up to {offset + nbytes} were wanted"
            )
        got += count


def describe_file(path: Path, head: int) -> SourceFile:
    """The name and size of `path` and the digest of its first `head` bytes. Raises `FormatError`."""
    try:
        with path.open("rb") as file:
            digest = blake3.blake3(unmarked(file.read(head))).hexdigest()
        return SourceFile(path.name, path.stat().st_size, digest)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error
