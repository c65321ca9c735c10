"""Copies the source's bytes into the files of a pack, step by step, each on disk before the next."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import blake3

from leanmoe.pack.consume import whole_pages
from leanmoe.pack.journal import Journal
from leanmoe.pack.plan import Piece
from leanmoe.pack.source import Source, read_at
from leanmoe.pack.steps import Part

CHUNK = 4 << 20
# Files synced at once: a file system commits them together, which is several times faster than one by one.
_SYNCING = 8


@dataclass(frozen=True, slots=True)
class PackProgress:
    """How far a pack or its verification is: bytes done and in all, and the file at hand."""

    done: int
    total: int
    name: str


ProgressCallback = Callable[[PackProgress], None]


def sync_directory(path: Path) -> None:
    """Makes the names in directory `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Copier:
    """Writes parts of targets into `directory`. A context manager: it owns the open source.

    Memory is one chunk whatever the model's size; what was read or written is dropped from the page cache.
    """

    def __init__(
        self, directory: Path, source: Source, journal: Journal, report: Callable[[int, str], None]
    ) -> None:
        """`report` is called with the bytes just written and the file's name.

        Raises `OSError`, and `UsageError` if another process is freeing the source.
        """
        self.directory, self.journal, self.report = directory, journal, report
        self._buffer = memoryview(bytearray(CHUNK))
        self._zeros = bytes(CHUNK)
        self._hasher = blake3.blake3()
        self._hashed: tuple[str, int] | None = None
        self._stack = ExitStack()
        with ExitStack() as stack:
            self._source = stack.enter_context(source.open(journal.consumer))
            self._syncing = stack.enter_context(ThreadPoolExecutor(_SYNCING))
            self._stack = stack.pop_all()

    def __enter__(self) -> "Copier":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def write_step(self, step: list[Part]) -> None:
        """Writes `step`, syncs it, records it in the journal, and frees the source's part if so wanted."""
        digests: dict[str, bytes] = {}
        marks: dict[str, int] = {}
        directories: set[Path] = set()
        with ExitStack() as stack:
            outputs = []
            for part in step:
                path = self.directory / part.target.name
                path.parent.mkdir(parents=True, exist_ok=True)
                directories |= {path.parent, path.parent.parent, self.directory}
                output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
                stack.callback(os.close, output)
                outputs.append(output)
                self._write(part, output, path)
                if part.end == part.target.nbytes:
                    digests[part.target.name] = self._hasher.digest()
                else:
                    marks[part.target.name] = part.end
            list(self._syncing.map(os.fsync, outputs))
            for output in outputs:
                os.posix_fadvise(output, 0, 0, os.POSIX_FADV_DONTNEED)
        for directory in directories:
            sync_directory(directory)
        self.journal.record(digests, marks)
        self.free(step)

    def free(self, parts: list[Part]) -> None:
        """Frees the source's bytes of `parts`, which are on disk and recorded; nothing unless consuming."""
        if parts and self.journal.consumer is not None:
            for path, start, end in whole_pages(r for part in parts for r in part.source_ranges()):
                self._source.free(path, start, end - start)

    def _write(self, part: Part, output: int, path: Path) -> None:
        if part.start == 0:
            self._hasher = blake3.blake3()
        elif self._hashed != (part.target.name, part.start):
            self._hash_again(path, part.start)
        os.lseek(output, part.start, os.SEEK_SET)
        for piece in part.pieces():
            self._copy(piece, output, part.target.name)
        self._hashed = (part.target.name, part.end)
        # Starts the writing now, so that the sync at the end of the step waits less.
        os.posix_fadvise(output, 0, 0, os.POSIX_FADV_DONTNEED)

    def _hash_again(self, path: Path, nbytes: int) -> None:
        """After a resume: hashes the first `nbytes` of a file begun earlier."""
        self._hasher = blake3.blake3()
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for at in range(0, nbytes, CHUNK):
                data = self._buffer[: min(CHUNK, nbytes - at)]
                read_at(fd, path, at, data)
                self._hasher.update(data)
        finally:
            os.close(fd)

    def _copy(self, piece: Piece, output: int, name: str) -> None:
        for at in range(0, piece.nbytes, CHUNK):
            nbytes = min(CHUNK, piece.nbytes - at)
            if piece.path is not None:
                data = self._buffer[:nbytes]
                self._source.read(piece.path, piece.offset + at, data)
            else:
                data = memoryview(piece.data or self._zeros)[at if piece.data else 0 :][:nbytes]
            self._hasher.update(data)
            while data:
                data = data[os.write(output, data) :]
            self.report(nbytes, name)
        if piece.path is not None:
            self._source.done(piece.path, piece.offset, piece.nbytes)
