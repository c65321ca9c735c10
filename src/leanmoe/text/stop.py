"""Stop strings in a stream of text."""

from collections.abc import Sequence

from leanmoe.errors import UsageError


class StopMatcher:
    """Passes a stream of text on until a stop string appears, which is not passed on itself.

    Text that may turn out to be the beginning of a stop string is held back. The stop that is complete first
    counts (the longest of those), so the outcome does not depend on how the text was cut into pieces.
    """

    def __init__(self, stop: str | Sequence[str]) -> None:
        """`stop` is one string, or several, or none. Raises `UsageError` for one that is empty or not a string."""
        if isinstance(stop, str):
            stop = (stop,)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise UsageError(
                    f"{text!r} cannot be a stop string; wanted a string of at least one character"
                )
        self._stop = tuple(stop)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Adds text; returns what may be passed on and whether the stream has ended."""
        if self._stopped:
            return "", True
        self._held += text
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            _, start = min(found)
            passed, self._held, self._stopped = self._held[:start], "", True
            return passed, True
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        passed, self._held = self._held[:cut], self._held[cut:]
        return passed, False

    def flush(self) -> str:
        """Ends the stream: returns the text held back, which was no stop string after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop` but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
