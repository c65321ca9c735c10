"""How much to read ahead, found by trying: two settings take turns, a token each, and the faster one stays.

Whether reading ahead pays depends on what the disk, the caches below it, the processor and the predictions do
together, and published results go both ways. So nothing is modelled; the only thing that counts is the time a
token takes. Settings are levels: 0 reads nothing ahead, 1 one expert while the disk is idle, and each level
from 2 on one more expert at once, beside demand reads.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal, Protocol

from leanmoe.experts.readers import Ahead

Prefetch = Literal["off", "auto", "on"]
"""Nothing is read ahead; as much as makes tokens faster; always as much."""
DEFAULT_LEVEL = 3
"""With prefetch "on" and no level given: two experts at once, beside demand reads."""
Predictor = Literal["gate", "transitions", "both"]
"""See `ExpertPool.open`."""


def allowance(level: int) -> Ahead:
    """What the readers may do at a level."""
    return Ahead(max(level - 1, 1), True) if level > 1 else Ahead(level, False)


def highest_level(readers: int) -> int:
    """The level at which all reader threads but one read ahead."""
    return max(2, readers)


class Throttle(Protocol):
    """Gives the level for the token being computed, and learns what it took."""

    @property
    def level(self) -> int: ...

    def token(self, seconds: float, issued: int, used: int) -> None:
        """A token took `seconds`; meanwhile `issued` reads ahead began and `used` were asked for, late or not."""


class Fixed:
    """Always the same level."""

    def __init__(self, level: int) -> None:
        self.level = level

    def token(self, seconds: float, issued: int, used: int) -> None:
        pass


class Survey:
    """Several levels in turn, `block` tokens each, back and forth, to compare them: 0 1 2 3, 3 2 1 0, 0 1 2 3 ...

    What a level reads in vain, another would pay for if they took turns by the token: what it evicted is missed later.
    So the first `settling` tokens of a block do not count.
    """

    block, settling = 16, 4

    def __init__(self, levels: Sequence[int]) -> None:
        self.seconds: dict[int, list[float]] = {level: [] for level in levels}
        """What a token took at each level, the mean of a block; the i-th of all levels are of the same round."""
        self._order = list(levels)[::-1]
        self._next = list(levels)
        self._taken: list[float] = []

    @property
    def level(self) -> int:
        return self._order[-1]

    def token(self, seconds: float, issued: int, used: int) -> None:
        self._taken.append(seconds)
        if len(self._taken) < self.block:
            return
        self.seconds[self._order.pop()].append(statistics.fmean(self._taken[self.settling :]))
        self._taken = []
        if not self._order:
            self._order, self._next = self._next.copy(), self._next[::-1]

    def gains(self) -> dict[int, tuple[float, float]]:
        """For each level: the mean logarithm of its time over level 0's in the same round, and its standard error.

        Raises `ValueError` before two rounds are over.
        """
        rounds = min(len(taken) for taken in self.seconds.values())
        if rounds < 2:
            raise ValueError(f"{rounds} rounds; wanted 2 at least")
        found = {}
        for level, taken in self.seconds.items():
            pairs = zip(self.seconds[0][:rounds], taken[:rounds], strict=True)
            ratios = [math.log(mine / without) for without, mine in pairs]
            found[level] = (statistics.fmean(ratios), statistics.stdev(ratios) / math.sqrt(rounds))
        return found

    def best(self, certainty: float = 2.0) -> int:
        """Of the levels faster than 0 by `certainty` standard errors, the one with the lowest mean; else 0."""
        gains = self.gains()
        sure = [n for n, (mean, error) in gains.items() if mean + certainty * error < 0]
        return min(sure, key=lambda level: gains[level][0], default=0)


class Duel:
    """Keeps a level until another one is faster.

    The level in use and a challenger take turns token by token, the order swapping with each pair so that a
    drift favours neither. After `least` pairs the challenger wins (or loses) as soon as the mean logarithm of
    its time over the other's is below (or above) 0 by `certainty` standard errors; after `most` pairs the
    lower level wins. Then the winner is used alone for `hold` tokens; each time it wins again the next
    challenge is put off twice as long, up to `longest_hold` for level 0 and 4 `hold` for others, since a disk
    may become busy.

    Challengers of level 0 are 2 and 1; those of a higher level are one more and 0. A challenger of whose guesses
    less than `least_used` are asked for loses at once; the level in use is halved.
    """

    least, most, certainty = 6, 24, 1.5
    hold, longest_hold = 32, 512
    least_used, enough_guesses = 0.2, 48

    def __init__(self, highest: int) -> None:
        self.kept = 0
        """The level that won the last duel."""
        self.challenger: int | None = None
        self._highest = highest
        self._turn = 0  # of challengers
        self._hold = self.hold
        self._alone = 0  # tokens to go until the next duel
        self._pairs: list[float] = []
        self._half: float | None = None  # log seconds of the first token of a pair
        self._issued = self._used = 0
        self._challenge()

    @property
    def level(self) -> int:
        return self.challenger if self.challenger is not None and self._challengers_turn() else self.kept

    def token(self, seconds: float, issued: int, used: int) -> None:
        if self._mostly_wasted(issued, used):
            return
        if self.challenger is None:
            self._alone -= 1
            if self._alone <= 0:
                self._challenge()
            return
        took = math.log(max(seconds, 1e-9))
        if self._half is None:
            self._half = took
            return
        ratio = self._half - took if len(self._pairs) % 2 else took - self._half
        self._half = None
        self._pairs.append(max(-1.0, min(1.0, ratio)))  # one hiccup must not decide
        self._judge()

    def _challengers_turn(self) -> bool:
        """Pairs are (kept, challenger) and (challenger, kept) in turn."""
        first = self._half is None
        return first if len(self._pairs) % 2 else not first

    def _mostly_wasted(self, issued: int, used: int) -> bool:
        self._issued += issued
        self._used += used
        if self._issued < self.enough_guesses:
            return False
        wasted = self._used < self.least_used * self._issued
        self._issued = self._used = 0
        if wasted:
            if self.challenger is None or self.challenger < self.kept:
                self.kept //= 2
            self._settle(again=True)
        return wasted

    def _judge(self) -> None:
        n = len(self._pairs)
        if n < self.least:
            return
        assert self.challenger is not None
        mean, error = statistics.fmean(self._pairs), statistics.stdev(self._pairs) / math.sqrt(n)
        faster, slower = mean + self.certainty * error < 0, mean - self.certainty * error > 0
        if faster or (n >= self.most and not slower and self.challenger < self.kept):
            self.kept = self.challenger
            self._settle(again=False)
        elif slower or n >= self.most:
            self._settle(again=True)

    def _settle(self, *, again: bool) -> None:
        longest = self.longest_hold if self.kept == 0 else 4 * self.hold
        self._hold = min(2 * self._hold, longest) if again else self.hold
        self._alone, self.challenger = self._hold, None

    def _challenge(self) -> None:
        self._turn += 1
        above = min(self.kept + 1, self._highest)
        pair = (above, 0) if self.kept else (2, 1)
        self.challenger = pair[(self._turn - 1) % 2]
        if self.challenger == self.kept:
            self.challenger = 0
        self._pairs, self._half = [], None
        self._issued = self._used = 0
