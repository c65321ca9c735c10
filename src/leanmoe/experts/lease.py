"""One expert in a slot: what a caller sees of it (`Lease`), and what the cache keeps about it (`Slot`)."""

from typing import TYPE_CHECKING

import torch

from leanmoe.experts.device import Fence
from leanmoe.experts.policy import Key

if TYPE_CHECKING:
    from leanmoe.experts.acquire import Acquire


class Lease:
    """One expert in a slot: `data` is its whole file, uint8 [file_bytes], on the cache's device.

    Valid until the iterator that yielded it is asked for its next group or closed; read-only.
    """

    __slots__ = ("data", "expert", "layer")

    def __init__(self, data: torch.Tensor) -> None:
        self.layer, self.expert, self.data = -1, -1, data


class Slot(Lease):
    """A lease is the slot itself, so that a hit allocates nothing.

    `waiting` lists the acquires to tell when the read ends, and is None once the bytes are there. `guessed`:
    read ahead and not used since; `fresh`: moreover, its layer is still to come (see `Speculation`).
    """

    __slots__ = ("fence", "fresh", "guessed", "key", "pins", "waiting")

    def __init__(self, data: torch.Tensor) -> None:
        super().__init__(data)
        self.key: Key = (-1, -1)
        self.pins = 0
        self.guessed = self.fresh = False
        self.waiting: list[Acquire] | None = None
        self.fence: Fence = None

    def assign(self, key: Key) -> None:
        self.key = key
        self.layer, self.expert = key

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    @property
    def arrived(self) -> bool:
        return self.waiting is None
