"""Reading the next layer's experts while a long prompt still computes this one.

Without this the disk rests from a layer's last read to the next layer's routing, through all of its attention, and
the experts come a few at a time, each few with products of their own.
"""

from collections import deque
from collections.abc import Iterable

from leanmoe.experts.policy import Key


class Sweep:
    """What is still to be read of the next layer, and how many reads of it run. The cache's lock guards it."""

    def __init__(self, most: int) -> None:
        self._most = most  # reads at once
        self._keys: deque[Key] = deque()
        self._reading = 0

    def aim(self, keys: Iterable[Key]) -> None:
        """`keys` are wanted from now on; those of before no longer."""
        self._keys = deque(keys)

    def stop(self) -> None:
        """Nothing more is wanted; reads that run are not disturbed."""
        self._keys.clear()

    def next(self) -> Key | None:
        """The key that may be read now, if any; it counts as running until `ended`."""
        if not self._keys or self._reading >= self._most:
            return None
        self._reading += 1
        return self._keys.popleft()

    def ended(self) -> None:
        """One of the running reads is over, or was none after all."""
        self._reading -= 1
