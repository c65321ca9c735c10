"""Reading a whole file into memory and into a layout: one call of the extension, without the interpreter's lock."""

import os
from pathlib import Path

from leanmoe.kernels import _cpu
from leanmoe.kernels.cpu import Arrangement

Stamp = tuple[int, int, int]
"""Device, inode and time of change of a file: another one after any write to it, or its replacement."""


class NotWhole(Exception):
    """A file cannot fill the buffer; the text goes on after the file's name."""


class FileReader:
    """Reads files for any number of threads at once."""

    def __init__(self) -> None:
        self._native = _cpu.FileReader()

    def read(
        self,
        path: Path,
        buffer: memoryview,
        *,
        direct: bool,
        arrangement: Arrangement | None = None,
        only: Stamp | None = None,
    ) -> tuple[Stamp, bool]:
        """Fills `buffer` with the file, which must be as long, and applies `arrangement`, if one is given.

        `direct` reads past the page cache, for which `buffer` must be page-aligned; otherwise the file's pages are
        dropped from it. With `only`, a file with another stamp is left in its own order. Returns the stamp, and
        whether `arrangement` was applied.

        Raises `OSError`, or `NotWhole` if it is no regular file, of another length, or ends early. What the buffer
        holds is then undefined.
        """
        native = None if arrangement is None else arrangement.native
        outcome, error, nbytes, stamp, arranged = self._native.read(
            os.fsencode(path), buffer, direct, native, only
        )
        if outcome == _cpu.READ_WHOLE:
            return stamp, arranged
        if outcome == _cpu.READ_FAILED:
            raise OSError(error, os.strerror(error), str(path))
        if outcome == _cpu.READ_NOT_REGULAR:
            raise NotWhole("is not a regular file")
        if outcome == _cpu.READ_OTHER_SIZE:
            raise NotWhole(f"has {nbytes} bytes, not {len(buffer)}")
        raise NotWhole(f"ended after {nbytes} of {len(buffer)} bytes")

    @property
    def seconds(self) -> float:
        """Time up to now in which at least one file was being read; rearranging is no part of it."""
        return self._native.seconds()
