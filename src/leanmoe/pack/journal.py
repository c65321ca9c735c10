"""What a pack that is being written has finished, so that a killed `lean pack` resumes. See docs/format.md.

The journal is a text file that only grows. Its first line identifies the source; each later line says what
has safely reached the disk. A torn last line (a kill while appending) is ignored and cut off.
"""

import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from leanmoe.errors import FormatError, UsageError
from leanmoe.formats.consumed import MAX_CONSUMER
from leanmoe.pack.digests import LINE, NAME

JOURNAL = "journal"
_MARK = re.compile(rf"mark ([0-9]{{1,19}})  ({NAME})")
_CONSUME = re.compile(r"consume ([0-9a-f]{6})")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identifies a source and what is made of it: the digest of the manifest (which has the digests of the
    source's headers), and each shard's name, size and time of last change in nanoseconds."""

    manifest_digest: str
    files: tuple[tuple[str, int, int], ...]

    @classmethod
    def of(cls, manifest_digest: str, shards: Iterable[Path]) -> "Fingerprint":
        """The fingerprint of the source as it is on disk now. Raises `OSError`."""
        stats = [(shard.name, shard.stat()) for shard in shards]
        return cls(manifest_digest, tuple((name, s.st_size, s.st_mtime_ns) for name, s in stats))

    def to_line(self) -> str:
        """The first line of a journal."""
        return json.dumps({"journal": 2, "manifest_blake3": self.manifest_digest, "files": self.files})

    @classmethod
    def from_line(cls, line: str) -> "Fingerprint | None":
        """The fingerprint in the first line of a journal; None if that is no such line."""
        try:
            values = json.loads(line)
            if values["journal"] != 2:
                return None
            files = tuple((str(name), int(size), int(mtime)) for name, size, mtime in values["files"])
            return cls(str(values["manifest_blake3"]), files)
        except (ValueError, KeyError, TypeError):
            return None


class Journal:
    """The open, locked journal of a `.partial` directory. Owns its file descriptor until `close`.

    `digests` has the digest of each finished file, `marks` the bytes on disk of each file begun. `consumer`
    is the number by which the source is marked, parts of which may have been freed; None if it is kept.
    """

    def __init__(self, directory: Path) -> None:
        """Opens or creates the journal. Raises `UsageError` if another process is packing here, `OSError`."""
        self.path = directory / JOURNAL
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self.path.exists() or not os.path.samestat(self.path.stat(), os.fstat(self._fd)):
                raise BlockingIOError
        except BlockingIOError:
            os.close(self._fd)
            raise UsageError(f"{directory}: another lean pack is writing it; wait for it to finish") from None
        self.source: Fingerprint | None = None
        self.digests: dict[str, bytes] = {}
        self.marks: dict[str, int] = {}
        self.consumer: int | None = None
        self._load()

    @property
    def consuming(self) -> bool:
        """Whether parts of the source may have been freed."""
        return self.consumer is not None

    def close(self) -> None:
        """Releases the lock."""
        os.close(self._fd)

    def _load(self) -> None:
        with os.fdopen(os.dup(self._fd), "rb") as file:
            whole = file.read()
        good = 0
        for index, raw in enumerate(whole.split(b"\n")[:-1]):
            if not self._take(index, raw.decode("ascii", errors="replace")):
                break
            good += len(raw) + 1
        os.ftruncate(self._fd, good)
        os.lseek(self._fd, good, os.SEEK_SET)

    def _take(self, index: int, line: str) -> bool:
        """Takes in one line; False if it is not one that this class writes."""
        if index == 0:
            self.source = Fingerprint.from_line(line)
            return self.source is not None
        if consume := _CONSUME.fullmatch(line):
            self.consumer = int(consume[1], 16)
        elif digest := LINE.fullmatch(line):
            self.digests[digest[2]] = bytes.fromhex(digest[1])
        elif mark := _MARK.fullmatch(line):
            self.marks[mark[2]] = int(mark[1])
        else:
            return False
        return True

    def check(self, source: Fingerprint, consume: bool) -> None:
        """Checks that what is recorded here, if anything, was made from `source`.

        Raises `FormatError` if the source is another or has changed since, and `UsageError` if parts of it
        were freed and `consume` is not set.
        """
        if self.source is None:
            return
        theirs, ours = self.source, source
        if self.consuming:  # freeing parts of a file changes its time
            theirs, ours = _without_times(theirs), _without_times(ours)
        if theirs != ours:
            raise FormatError(
                f"{self.path.parent}: was begun from another source, or the source has changed since; delete "
                f"it to start over ({_difference(theirs, ours)})"
            )
        if self.consuming and not consume:
            raise UsageError(
                f"{self.path.parent}: was begun with --consume, so the source is partly freed; "
                "give --consume again"
            )

    def begin(self, source: Fingerprint, consume: bool) -> None:
        """Writes the first line if there is none, and says so if from now on the source is freed."""
        lines = [] if self.source else [source.to_line()]
        consumer = self.consumer
        if consume and consumer is None:
            consumer = secrets.randbelow(MAX_CONSUMER + 1)
            lines.append(f"consume {consumer:06x}")
        if lines:
            self._append(lines)
        self.source, self.consumer = self.source or source, consumer

    def record(self, digests: dict[str, bytes], marks: dict[str, int]) -> None:
        """Says that these files, and these many bytes of files begun, have reached the disk."""
        lines = [f"{digest.hex()}  {name}" for name, digest in digests.items()]
        self._append(lines + [f"mark {nbytes}  {name}" for name, nbytes in marks.items()])
        self.digests |= digests
        self.marks |= marks

    def forget(self, name: str) -> None:
        """Drops a file that was finished but is not there any more; it will be written again."""
        self.digests.pop(name, None)
        self.marks.pop(name, None)

    def _append(self, lines: list[str]) -> None:
        data = "".join(line + "\n" for line in lines).encode()
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)


def recorded_consumer(directory: Path) -> int | None:
    """The number by which the source of an unfinished pack in `directory` is marked, if it is being freed."""
    try:
        lines = (directory / JOURNAL).read_text("ascii", errors="replace").split("\n")[:-1]
    except (FileNotFoundError, NotADirectoryError):
        return None
    found = next(filter(None, map(_CONSUME.fullmatch, lines)), None)
    return int(found[1], 16) if found else None


def _difference(theirs: Fingerprint, ours: Fingerprint) -> str:
    """In what two sources differ: the number of files, the first that differs, or what is made of them."""
    if theirs.files == ours.files:
        return "its files are the same: what is made of them is not, as with another --quant or another lean"
    if len(theirs.files) != len(ours.files):
        return f"begun from {len(theirs.files)} files; given now: {len(ours.files)}"
    was, now = next(pair for pair in zip(theirs.files, ours.files, strict=True) if pair[0] != pair[1])
    if was[:2] == now[:2]:
        return f"{now[0]} of {now[1]} bytes was changed in between"
    return f"begun from {was[0]} of {was[1]} bytes; given now: {now[0]} of {now[1]} bytes"


def _without_times(fingerprint: Fingerprint) -> Fingerprint:
    return Fingerprint(
        fingerprint.manifest_digest, tuple((name, size, 0) for name, size, _ in fingerprint.files)
    )
