"""Small files that must be whole or not be there: written beside their place, then put into it.

Traces and profiles share a form: magic, version, length of a header, checksum, header, body (docs/experts.md).
"""

import os
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from leanmoe.errors import FormatError, UnsupportedError
from leanmoe.formats.io import read_small_file

_MAX_HEADER = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckedForm:
    """One kind of checked file. `magic` is 8 bytes, `name` what error messages call it.

    `newer` and `damaged` say what to do about a file of a newer version, and one that is not whole.
    """

    magic: bytes
    version: int
    name: str
    newer: str
    damaged: str
    overhead: ClassVar[int] = 20
    """Bytes before the header."""

    def write(self, path: Path, header: bytes, body: bytes) -> None:
        """Writes the file, or leaves what was there. Raises `OSError`."""
        rest = header + body
        numbers = (self.version, len(header), zlib.crc32(rest))
        replace_file(path, self.magic + b"".join(n.to_bytes(4, "little") for n in numbers) + rest)

    def read(self, path: Path, limit: int = sys.maxsize - 1) -> tuple[bytes, bytes]:
        """Header and body, as they were written.

        Raises `FormatError` if the file is not of this form, damaged, or of more than `limit` bytes; `UnsupportedError`
        if its version is newer; `OSError` if it cannot be read, or is no regular file.
        """
        data = read_small_file(path, limit)
        if len(data) > limit:
            raise FormatError(
                f"{path} has more than {limit} bytes, the most that {self.name} has; {self.damaged}"
            )
        if data[:8] != self.magic:
            raise FormatError(f"{path} is not {self.name}: it starts with {data[:8]!r}, not {self.magic!r}")
        version, length, checksum = (int.from_bytes(data[i : i + 4], "little") for i in (8, 12, 16))
        if version != self.version:
            raise UnsupportedError(
                f"{path} is {self.name} of version {version}, this lean reads version {self.version}; {self.newer}"
            )
        rest = data[self.overhead :]
        if length > min(_MAX_HEADER, len(rest)) or zlib.crc32(rest) != checksum:
            raise FormatError(
                f"{path} has {len(data)} bytes and not the checksum in it: cut short or damaged; {self.damaged}"
            )
        return rest[:length], rest[length:]


def replace_file(path: Path, data: bytes) -> None:
    """Makes `data` the content of `path` in one step that a crash cannot halve. Raises `OSError`."""
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
