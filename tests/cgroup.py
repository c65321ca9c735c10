"""The bench's memory limit, for tests: skips, with the reason, where the kernel or the user may not set one."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from leanmoe.bench import cgroup
from leanmoe.errors import UnsupportedError


@contextmanager
def memory_limit(nbytes: int) -> Iterator[cgroup.Group]:
    """A group limited to `nbytes` of memory, without swap."""
    with limits(nbytes) as group:
        yield group


@contextmanager
def limits(memory: int | None, disk: cgroup.DiskLimit | None = None) -> Iterator[cgroup.Group]:
    """As the bench's own."""
    with ExitStack() as stack:
        try:
            group = stack.enter_context(cgroup.limits(memory, disk))
        except UnsupportedError as reason:
            pytest.skip(str(reason))
        yield group
