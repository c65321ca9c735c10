"""A line of figures at the foot of the terminal, below text that goes on scrolling above it."""

import math
import os
import sys
import time
from types import TracebackType
from typing import Self, TextIO

_ERASE = "\r\x1b[2K"
_EVERY = 0.25  # seconds between updates on a terminal
_EVERY_LOGGED = 5.0  # and where each one is a line of its own


class PromptLine:
    """Shows on a terminal how far a prompt is computed, and erases that before anything else is printed there."""

    def __init__(self) -> None:
        self._shown = False

    def update(self, done: int, total: int) -> None:
        """`done` tokens of `total` are computed."""
        if done == total:
            self.erase()
        elif sys.stderr.isatty():
            self._shown = True
            print(f"{_ERASE}prompt {done} of {total} tokens", end="", file=sys.stderr, flush=True)

    def stopping(self) -> None:
        """The user wants no more, and what is being computed ends first. For use in a signal handler."""
        if self._shown:
            os.write(sys.stderr.fileno(), b" (stopping)")

    def erase(self) -> None:
        if self._shown:
            self._shown = False
            print(_ERASE, end="", file=sys.stderr, flush=True)


class StatusLine:
    """Shows one line, kept up to date, while other text is printed to the same terminal.

    On a terminal the last row is taken out of the scrolling region for as long as it lasts. Elsewhere (a file, a
    pipe) a line is written every few seconds, unless the text goes to the very same place.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty() and os.get_terminal_size(self._stream.fileno()).lines > 2
        self._next = math.inf if not self._terminal and _one_place(sys.stdout, self._stream) else 0.0
        self._rows = self._columns = 0

    @property
    def due(self) -> bool:
        """Whether an update would be shown now."""
        return time.monotonic() >= self._next

    def update(self, text: str) -> None:
        """Shows `text` in place of what is there."""
        now = time.monotonic()
        if not self._terminal:
            self._next = now + _EVERY_LOGGED
            print(text, file=self._stream, flush=True)
            return
        self._next = now + _EVERY
        size = os.get_terminal_size(self._stream.fileno())
        if (size.lines, size.columns) != (self._rows, self._columns):
            self._rows, self._columns = size.lines, size.columns
            # A newline makes room for the line if the cursor is at the bottom.
            self._write(f"\n\x1b[A\x1b7\x1b[1;{self._rows - 1}r\x1b8")
        self._write(f"\x1b7\x1b[{self._rows};1H\x1b[2K\x1b[7m{text[: self._columns]}\x1b[0m\x1b8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rows:  # gives the last row back, and clears it
            self._write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")

    def _write(self, codes: str) -> None:
        self._stream.write(codes)
        self._stream.flush()


def _one_place(first: TextIO, second: TextIO) -> bool:
    try:
        return os.path.samestat(os.fstat(first.fileno()), os.fstat(second.fileno()))
    except (OSError, ValueError):  # a stream without a file
        return False
