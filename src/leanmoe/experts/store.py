"""Expert files on disk: one read per expert, straight into memory that the caller owns."""

import errno
import logging
import os
import stat
import threading
from pathlib import Path
from typing import Literal

from blake3 import blake3

from leanmoe.errors import ExpertReadError
from leanmoe.experts.policy import Key
from leanmoe.experts.stats import BusyClock
from leanmoe.pack import Pack

Verify = Literal["first", "always", "never"]

_Stamp = tuple[int, int, int]
"""Device, inode and time of change: another one after any write to a file, or its replacement."""

_log = logging.getLogger(__name__)
# What file systems without O_DIRECT answer, at open or at the first read.
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


class ExpertStore:
    """Reads the experts of one pack. Any number of threads may read at once.

    Reads use O_DIRECT, so that the page cache does not grow behind the budget. Where the file system refuses,
    they are buffered and the pages dropped at once, and the log says so (once); `direct=False` asks for that
    outright.

    `verify` says when a file's digest is checked: "first" on its first read in this process (and again if it was
    written or replaced since), "always", or "never".
    """

    def __init__(self, pack: Pack, *, verify: Verify = "first", direct: bool = True) -> None:
        self.pack = pack
        self._verify = verify
        self._direct = direct
        self._lock = threading.Lock()
        self._sizes = {layer.layer: layer.layout.file_bytes for layer in pack.manifest.layers}
        self._verified: dict[Key, _Stamp] = {}
        self._clock = BusyClock()

    def size(self, layer: int) -> int:
        """Bytes of each expert file of `layer`: a multiple of 4096."""
        return self._sizes[layer]

    @property
    def reading_seconds(self) -> float:
        """Time up to now in which at least one read was in flight."""
        return self._clock.seconds

    def read_into(self, key: Key, buffer: memoryview) -> None:
        """Fills `buffer`, which is page-aligned and exactly as long as the file, with the expert's bytes.

        Raises `ExpertReadError`, naming the file, if it is missing, of another length, cannot be read, or
        does not match its digest. What the buffer holds is then undefined.
        """
        path = self.pack.expert_path(*key)
        try:
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode):
                raise self._fault(path, "is not a regular file")
            if found.st_size != len(buffer):
                raise self._fault(path, f"has {found.st_size} bytes, not {len(buffer)}")
            with self._clock.busy():
                self._read(path, buffer)
        except OSError as error:
            raise self._fault(path, f"cannot be read: {error.strerror}") from error
        stamp = (found.st_dev, found.st_ino, found.st_ctime_ns)
        if self._verify == "always" or (self._verify == "first" and self._verified.get(key) != stamp):
            self._check_digest(key, path, buffer)
            self._verified[key] = stamp

    def _read(self, path: Path, buffer: memoryview) -> None:
        if self._direct:
            try:
                return self._read_whole(path, buffer, direct=True)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
                self._give_up_direct(path, error)
        return self._read_whole(path, buffer, direct=False)

    def _read_whole(self, path: Path, buffer: memoryview, *, direct: bool) -> None:
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            done = 0
            while done < len(buffer):
                n = os.preadv(fd, [buffer[done:]], done)
                if n == 0:
                    raise self._fault(path, f"ended after {done} of {len(buffer)} bytes")
                done += n
        finally:
            if not direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def _check_digest(self, key: Key, path: Path, buffer: memoryview) -> None:
        found, wanted = blake3(buffer).digest(), self.pack.expert_digest(*key)
        if found != wanted:
            raise self._fault(path, f"has digest {found.hex()[:16]}..., not {wanted.hex()[:16]}...")

    def _give_up_direct(self, path: Path, error: OSError) -> None:
        with self._lock:
            if self._direct:
                self._direct = False
                _log.warning(
                    "%s: this file system refuses O_DIRECT (%s); reading through the page cache, "
                    "dropping the pages after use",
                    path,
                    error.strerror,
                )

    def _fault(self, path: Path, what: str) -> ExpertReadError:
        return ExpertReadError(f"expert file {path} {what}; `lean verify {self.pack.path}` lists every fault")
