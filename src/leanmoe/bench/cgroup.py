"""Running a command under a kernel-enforced memory limit, version 1 or 2 of control groups, without swap."""

import os
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from leanmoe.errors import UnsupportedError

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Group:
    """A control group made for one measurement or test."""

    path: Path
    version: int

    def run(self, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Runs `command` inside the group, output captured; the limit covers it from its first instruction."""
        script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        return subprocess.run(
            ["sh", "-c", script, str(self.path), *command], capture_output=True, text=True, check=False
        )

    def killed(self) -> int:
        """How often the kernel killed a process of the group for want of memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        for line in (self.path / name).read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0


@contextmanager
def memory_limit(nbytes: int) -> Iterator[Group]:
    """A group limited to `nbytes` of memory, without swap. Raises `UnsupportedError` where none may be made."""
    name = f"lean-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    if (_V2 / "cgroup.controllers").exists():
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        group = Group(_V2 / own / name, 2)
        settings = {"memory.max": nbytes, "memory.swap.max": 0}
    elif (_V1 / "memory.limit_in_bytes").exists():
        group = Group(_V1 / name, 1)
        settings = {"memory.limit_in_bytes": nbytes, "memory.swappiness": 0}
    else:
        raise UnsupportedError("this machine has no memory control groups")
    try:
        group.path.mkdir()
    except OSError as refused:
        raise UnsupportedError(f"this user may not make a memory control group: {refused}") from None
    try:
        try:
            for key, value in settings.items():
                (group.path / key).write_text(str(value))
        except OSError as refused:
            raise UnsupportedError(f"this user may not limit memory: {refused}") from None
        yield group
    finally:
        group.path.rmdir()
