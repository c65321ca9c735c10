"""The reader threads: demand reads first, then reads ahead, then background reads in what is left over."""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from leanmoe.errors import LeanError


class Ahead(NamedTuple):
    """How much may be read ahead of demand: `depth` tasks at once, and only `beside` demand reads if so."""

    depth: int
    beside: bool


class _Lane(IntEnum):
    DEMAND = 0
    AHEAD = 1
    BACKGROUND = 2


class Readers:
    """A fixed number of threads that run read tasks from three lanes.

    *Demand* tasks go first, in order of arrival. Those *ahead* go next, the one due soonest first; while they
    are queued they may be taken back. *Background* tasks run only while no demand task runs. Neither of the
    last two starts while a demand task is queued, and together they never occupy all the threads (unless there
    is only one), so that a demand read need not wait for one of them to end. The queues are bounded by what
    feeds them: a demand task owns a slot, and the others name an expert.
    """

    def __init__(self, threads: int) -> None:
        self.count = threads
        self._changed = threading.Condition()
        self._demand: deque[Callable[[], object]] = deque()
        self._ahead: dict[Hashable, tuple[float, Callable[[], object]]] = {}
        self._background: deque[tuple[Future[bool], Callable[[], bool]]] = deque()
        self._running = [0] * len(_Lane)
        self._allowed = Ahead(0, False)
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"expert-reader-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, tasks: Sequence[Callable[[], object]]) -> None:
        """Queues demand reads. The tasks must not raise. Raises `LeanError` once closed."""
        with self._changed:
            self._check_open()
            self._demand.extend(tasks)
            self._changed.notify(len(tasks))

    def submit_ahead(self, key: Hashable, due: float, task: Callable[[], object]) -> bool:
        """Queues a read ahead of demand, in the order of `due`. The task must not raise.

        False, and nothing happens, if `key` is queued already or the readers are closed.
        """
        with self._changed:
            if self._closed or key in self._ahead:
                return False
            self._ahead[key] = (due, task)
            self._changed.notify()
            return True

    def cancel_ahead(self, key: Hashable) -> bool:
        """Takes a read ahead back; False if it is not queued (any more)."""
        with self._changed:
            return self._ahead.pop(key, None) is not None

    def allow_ahead(self, allowed: Ahead) -> None:
        """How many reads ahead may run at once from now on, and whether beside demand reads. None at first."""
        with self._changed:
            self._allowed = allowed
            if self._ahead:
                self._changed.notify()

    def submit_background(self, task: Callable[[], bool]) -> Future[bool]:
        """Queues a background read; the future has its result or error, and is cancelled by `close`."""
        future: Future[bool] = Future()
        with self._changed:
            self._check_open()
            self._background.append((future, task))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Lets running reads end, drops the queued ones, and joins the threads. May be called again."""
        with self._changed:
            self._closed = True
            dropped = [future for future, _ in self._background]
            self._demand.clear()
            self._ahead.clear()
            self._background.clear()
            self._changed.notify_all()
        for future in dropped:
            future.cancel()
        for thread in self._threads:
            thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise LeanError("the expert readers are closed")

    def _run(self) -> None:
        finished = None
        while found := self._next(finished):
            finished, task = found
            task()

    def _next(self, finished: _Lane | None) -> tuple[_Lane, Callable[[], object]] | None:
        """Notes that a task of lane `finished` has ended, and waits for another; None once closed."""
        with self._changed:
            if finished is not None:
                self._running[finished] -= 1
            while not self._closed:
                if found := self._choose():
                    self._running[found[0]] += 1
                    if found[0] is not _Lane.DEMAND and (self._ahead or self._background):
                        self._changed.notify()  # there may be room for another
                    return found
                self._changed.wait()
        return None

    def _choose(self) -> tuple[_Lane, Callable[[], object]] | None:
        if self._demand:
            return _Lane.DEMAND, self._demand.popleft()
        ahead, demand = self._running[_Lane.AHEAD], self._running[_Lane.DEMAND]
        if ahead + self._running[_Lane.BACKGROUND] >= max(1, self.count - 1):
            return None
        depth, beside = self._allowed
        if self._ahead and ahead < depth and (beside or not demand):
            _, task = self._ahead.pop(min(self._ahead, key=lambda key: self._ahead[key][0]))
            return _Lane.AHEAD, task
        if self._background and not demand:
            return _Lane.BACKGROUND, partial(_settle, *self._background.popleft())
        return None


def _settle(future: Future[bool], task: Callable[[], bool]) -> None:
    try:
        if future.set_running_or_notify_cancel():
            future.set_result(task())
    except Exception as error:
        future.set_exception(error)
