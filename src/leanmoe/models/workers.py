"""Threads for the pieces of torch work that are worth dividing.

torch's own threads stay off on the CPU: between products they would spin against those of the kernels, and on a
busy machine one small operation could wait milliseconds for its slowest thread.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """torch's operations run on the calling thread alone; afterwards torch is as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Workers:
    """`count` threads that run tasks side by side; with 1, or once closed, the caller runs them itself."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1, "lean-compute") if count > 1 else None

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Runs every task and returns when all are done; raises the first error. The caller takes its share."""
        pool = self._pool
        if pool is None or len(tasks) == 1:
            for task in tasks:
                task()
            return
        left = list(reversed(tasks))

        def work() -> None:
            with torch.inference_mode():
                while left:
                    try:
                        task = left.pop()
                    except IndexError:  # another thread took the last one
                        return
                    task()

        others = [pool.submit(work) for _ in range(min(self.count, len(tasks)) - 1)]
        try:
            work()
        finally:
            for other in others:
                other.result()

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
