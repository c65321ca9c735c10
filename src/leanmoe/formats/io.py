"""Reading large files past the page cache, so that it does not grow behind a memory budget."""

import errno
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)
_said: set[str] = set()


@dataclass(frozen=True, slots=True)
class DirectFile:
    """An open file. `direct` says that O_DIRECT holds: offsets, lengths and addresses must be page multiples."""

    fd: int
    direct: bool

    def consumed(self, offset: int, nbytes: int) -> None:
        """Says that these bytes are not needed in the page cache any more."""
        if not self.direct:
            os.posix_fadvise(self.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def read_small_file(path: Path, limit: int) -> bytes:
    """The bytes of the regular file `path`. Raises `OSError`, also for a device or a pipe; `limit` + 1 bytes at most.

    A longer file comes back with one byte more than the limit, for the caller to refuse.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for a writer
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read(min(found.st_size, limit) + 1)  # allocated before it is read


@contextmanager
def open_direct(path: Path) -> Iterator[DirectFile]:
    """Opens `path` for reading with O_DIRECT; where the file system refuses it, buffered (logged once)."""
    try:
        fd, direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC), True
    except OSError as refused:
        if isinstance(refused, FileNotFoundError | PermissionError | IsADirectoryError):
            raise
        fd, direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
        if "direct" not in _said:
            _said.add("direct")
            logger.warning(
                "%s: the file system refuses O_DIRECT (%s); reading through the page cache", path, refused
            )
    try:
        yield DirectFile(fd, direct)
    finally:
        os.close(fd)
