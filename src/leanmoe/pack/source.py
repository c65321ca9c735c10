"""Where the bytes of a pack come from: the files of a GGUF model, or a model that is converted as it is read."""

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
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

    @property
    def arriving(self) -> bool:
        """Whether files are still arriving: what needs the first of them is then written first, the trunk last."""

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

    def __init__(
        self, gguf: GGUFFile, arrive: Callable[[Path], None] | None = None, *, marks: bool = True
    ) -> None:
        """`arrive` is called before a file is opened, which is when it is first read, and may wait for it.

        `marks`: shards that are to be freed are marked first, so that nobody takes them for a model; not where
        they are a download's own, which would take a marked one for damaged.
        """
        self.gguf = gguf
        self._arrive, self._marks = arrive, marks

    @property
    def arriving(self) -> bool:
        return self._arrive is not None

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
        """Opens each shard when it is first read; those to be freed at once, so that nobody else frees them."""
        marked = self.gguf.shards if consumer is not None and self._marks else ()
        with ExitStack() as stack:
            reader = _FileReader(stack, consumer, marked, self._arrive)
            if consumer is not None and self._arrive is None:
                reader.claim(self.gguf.shards)
            yield reader


class _FileReader:
    """Bytes of files, each opened when it is first read and closed by `stack`."""

    def __init__(
        self,
        stack: ExitStack,
        consumer: int | None,
        to_mark: tuple[Path, ...],
        arrive: Callable[[Path], None] | None,
    ) -> None:
        self._stack, self._consumer, self._to_mark, self._arrive = stack, consumer, to_mark, arrive
        self._fds: dict[Path, int] = {}

    def claim(self, paths: Iterable[Path]) -> None:
        """Opens and locks these files now."""
        for path in paths:
            self._fd(path)

    def _fd(self, path: Path) -> int:
        if path not in self._fds:
            if self._arrive is not None:
                self._arrive(path)
            flags = os.O_CLOEXEC | (os.O_RDONLY if self._consumer is None else os.O_RDWR)
            self._fds[path] = os.open(path, flags)
            self._stack.callback(os.close, self._fds[path])
            if self._consumer is not None:
                _lock(self._fds[path], path)
        return self._fds[path]

    def read(self, path: Path, offset: int, buffer: memoryview) -> None:
        read_at(self._fd(path), path, offset, buffer)

    def done(self, path: Path, offset: int, nbytes: int) -> None:
        os.posix_fadvise(self._fd(path), offset, nbytes, os.POSIX_FADV_DONTNEED)

    def free(self, path: Path, offset: int, nbytes: int) -> None:
        if self._to_mark:  # all shards, each on disk before the first hole
            assert self._consumer is not None
            for shard in self._to_mark:
                mark(self._fd(shard), shard, self._consumer)
            self._to_mark = ()
        punch(self._fd(path), offset, nbytes)


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
