"""How long a thread computes inside the C++ extension, for measurements: nothing is timed unless asked for."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from leanmoe.kernels import _cpu


class KernelClock:
    """`seconds` inside the extension so far, in `calls` calls; `names` says of what, as "linear" or "Plan.run"."""

    __slots__ = ("names", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.names = Counter[str]()

    @property
    def calls(self) -> int:
        return self.names.total()


@contextmanager
def clocked(now: Callable[[], float] = time.perf_counter) -> Iterator[KernelClock]:
    """Inside the `with` block every call of the extension by this thread is added to the clock, which `now` drives.

    Other threads' calls run as ever and are not counted: they go on beside this thread's. One block at a time.
    """
    clock, thread = KernelClock(), threading.get_ident()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            if threading.get_ident() != thread:
                return function(*args, **named)
            begun = now()
            try:
                return function(*args, **named)
            finally:
                clock.seconds += now() - begun
                clock.names[name] += 1

        return call

    originals = list(_functions())
    for owner, name, function in originals:
        full = f"{owner.__name__}.{name}" if isinstance(owner, type) else name
        setattr(owner, name, timed(full, function))
    try:
        yield clock
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def _functions() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """The extension's functions, and the methods of its classes."""
    for name, value in list(vars(_cpu).items()):
        if isinstance(value, type):
            methods = ((n, m) for n, m in list(vars(value).items()) if not n.startswith("_") and callable(m))
            yield from ((value, n, m) for n, m in methods)
        elif callable(value) and not name.startswith("_"):
            yield _cpu, name, value
