"""The reader threads. Demand reads go first; background reads use what they leave over."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from leanmoe.errors import LeanError


class Readers:
    """A fixed number of threads that run read tasks: demand first, in order of arrival, then background.

    Background tasks never occupy all the threads (unless there is only one), so that a demand read need not
    wait for one of them to end. The queues are bounded by what feeds them: a demand task owns a slot, and a
    background task names an expert.
    """

    def __init__(self, threads: int) -> None:
        self.count = threads
        self._changed = threading.Condition()
        self._demand: deque[Callable[[], object]] = deque()
        self._background: deque[tuple[Future[bool], Callable[[], bool]]] = deque()
        self._background_running = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"expert-reader-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], object]) -> None:
        """Queues a demand read. The task must not raise. Raises `LeanError` once closed."""
        with self._changed:
            self._check_open()
            self._demand.append(task)
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
        while (task := self._next()) is not None:
            task()

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            while not self._closed:
                if self._demand:
                    return self._demand.popleft()
                if self._background and self._background_running < max(1, self.count - 1):
                    self._background_running += 1
                    future, task = self._background.popleft()
                    return lambda: self._run_background(future, task)
                self._changed.wait()
        return None

    def _run_background(self, future: Future[bool], task: Callable[[], bool]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(task())
        except Exception as error:
            future.set_exception(error)
        finally:
            with self._changed:
                self._background_running -= 1
                self._changed.notify()
