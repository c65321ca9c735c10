"""Expert files on disk: one read per expert, straight into memory that the caller owns."""

import errno
import logging
import threading
from pathlib import Path

from blake3 import blake3

from leanmoe.errors import ExpertReadError
from leanmoe.experts.checked import keep_checked, load_checked, settled
from leanmoe.experts.policy import Key
from leanmoe.kernels import Arrangement
from leanmoe.kernels.files import FileReader, NotWhole, Stamp
from leanmoe.pack import Pack
from leanmoe.pack.digests import Verify

_log = logging.getLogger(__name__)
# What file systems without O_DIRECT answer, at open or at the first read.
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


class ExpertStore:
    """Reads the experts of one pack. Any number of threads may read at once.

    Reads use O_DIRECT, so that the page cache does not grow behind the budget. Where the file system refuses,
    they are buffered and the pages dropped at once, and the log says so (once); `direct=False` asks for that
    outright.

    `verify` says when a file's digest is checked: "first" on its first read since it was written or replaced, which
    the pack remembers when the store is closed (`checked.py`), "always", or "never".
    """

    def __init__(self, pack: Pack, *, verify: Verify = "first", direct: bool = True) -> None:
        self.pack = pack
        self._verify = verify
        self._direct = direct
        self._lock = threading.Lock()
        self._sizes = {layer.layer: layer.layout.file_bytes for layer in pack.manifest.layers}
        self._experts = sum(layer.expert_count for layer in pack.manifest.layers)
        self._verified: dict[Key, Stamp] = load_checked(pack.path, self._experts) if verify == "first" else {}
        self._to_keep: dict[Key, Stamp] = {}
        self._files = FileReader()

    def close(self) -> None:
        """Has the pack remember what was checked; may be called again. Nothing is read meanwhile."""
        if self._to_keep:
            keep_checked(self.pack.path, self._experts, self._to_keep)
            self._to_keep = {}

    def size(self, layer: int) -> int:
        """Bytes of each expert file of `layer`: a multiple of 4096."""
        return self._sizes[layer]

    @property
    def reading_seconds(self) -> float:
        """Time up to now in which at least one read was in flight."""
        return self._files.seconds

    def read_into(self, key: Key, buffer: memoryview, arrangement: Arrangement | None = None) -> None:
        """Fills `buffer`, which is page-aligned and exactly as long as the file, with the expert's bytes.

        They are in the file's order, or as `arrangement` makes them. Raises `ExpertReadError`, naming the file, if it
        is missing, of another length, cannot be read, or does not match its digest. What the buffer holds is then
        undefined.
        """
        path, known = self.pack.expert_path(*key), self._verified.get(key)
        # Digests are of the file's order: what is to be checked is rearranged afterwards.
        trusted = self._verify == "never" or (self._verify == "first" and known is not None)
        try:
            stamp, arranged = self._read(path, buffer, arrangement if trusted else None, known)
        except NotWhole as error:
            raise self._fault(path, str(error)) from None
        except OSError as error:
            raise self._fault(path, f"cannot be read: {error.strerror}") from error
        if self._verify == "always" or (self._verify == "first" and known != stamp):
            self._check_digest(key, path, buffer)
            self._verified[key] = stamp
            if self._verify == "first" and settled(stamp):
                self._to_keep[key] = stamp
        if arrangement is not None and not arranged:
            arrangement.apply(buffer)

    def _read(
        self, path: Path, buffer: memoryview, arrangement: Arrangement | None, only: Stamp | None
    ) -> tuple[Stamp, bool]:
        if self._direct:
            try:
                return self._files.read(path, buffer, direct=True, arrangement=arrangement, only=only)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
                self._give_up_direct(path, error)
        return self._files.read(path, buffer, direct=False, arrangement=arrangement, only=only)

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
