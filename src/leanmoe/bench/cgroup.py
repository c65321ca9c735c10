"""Running a command under a kernel-enforced memory limit, version 1 or 2 of control groups, without swap."""

import math
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from leanmoe.errors import UnsupportedError

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_POLL_SECONDS = 0.02
_HOW = "run as root, or in a delegated group: systemd-run --user --scope -p Delegate=yes COMMAND"


# How long a command may take to end after it was asked to.
_GRACE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended. `peak` is the most memory it held, its mapped files included; `in_time` is False if it was
    interrupted for taking too long, and may have printed what it had done by then."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    peak: int
    in_time: bool


@dataclass(frozen=True, slots=True)
class Group:
    """A control group made for one measurement or test; without a `path`, none at all."""

    path: Path | None
    version: int

    def run(
        self, command: Sequence[str], *, stdin: Path | None = None, seconds: float = math.inf
    ) -> Finished:
        """Runs `command` inside the group, output captured; the limit covers it from its first instruction.

        After `seconds` it gets SIGINT as from Ctrl-C, and SIGKILL if it goes on for another minute.
        """
        if self.path is not None:
            script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
            command = ["sh", "-c", script, str(self.path), *command]
        source = Path(os.devnull) if stdin is None else stdin
        with source.open("rb") as given, TemporaryFile() as out, TemporaryFile() as err:
            begun = time.perf_counter()
            process = subprocess.Popen(command, stdin=given, stdout=out, stderr=err, start_new_session=True)
            in_time, status, peak = _wait(process, begun, seconds)
            taken = time.perf_counter() - begun
            for file in (out, err):
                file.seek(0)
            printed, complained = (file.read().decode(errors="replace") for file in (out, err))
        return Finished(status, printed, complained, taken, peak, in_time)

    def killed(self) -> int:
        """How often the kernel killed a process of the group for want of memory."""
        if self.path is None:
            return 0
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        for line in (self.path / name).read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0


def _wait(process: "subprocess.Popen[bytes]", begun: float, seconds: float) -> tuple[bool, int, int]:
    """Whether the process ended in time, its exit status (negative for a signal), and its peak in bytes."""
    asked = forced = False
    try:
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                return not asked, process.returncode, usage.ru_maxrss * 1024
            over = time.perf_counter() - begun - seconds
            if over > 0 and not asked:
                asked = True
                os.kill(process.pid, signal.SIGINT)
            elif over > _GRACE_SECONDS and not forced:
                forced = True
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def nearest_with_memory(root: Path, own: str) -> Path:
    """The innermost group, from `own` up to `root`, that may limit the memory of new groups in it.

    Version 2 allows that only in groups whose processes are all in inner ones, which a shell's own is not.
    Raises `UnsupportedError` if this user may use none of them.
    """
    group = root / own
    for parent in (group, *group.parents):
        enabled = parent / "cgroup.subtree_control"
        if enabled.exists() and "memory" in enabled.read_text().split() and os.access(parent, os.W_OK):
            return parent
        if parent == root:
            break
    raise UnsupportedError(f"no group from {group} upwards lets this user limit memory; {_HOW}")


@contextmanager
def memory_limit(nbytes: int | None) -> Iterator[Group]:
    """A group limited to `nbytes` of memory, without swap; None limits nothing and makes no group.

    Raises `UnsupportedError`, saying what is missing, where none may be made.
    """
    if nbytes is None:
        yield Group(None, 0)
        return
    name = f"lean-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    if (_V2 / "cgroup.controllers").exists():
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        path, version = nearest_with_memory(_V2, own) / name, 2
        settings = {"memory.max": nbytes, "memory.swap.max": 0}
    elif (_V1 / "memory.limit_in_bytes").exists():
        path, version = _V1 / name, 1
        settings = {"memory.limit_in_bytes": nbytes, "memory.swappiness": 0}
    else:
        raise UnsupportedError(
            f"no memory control groups in {_V2}: mount them, or give the container access to the host's"
        )
    try:
        path.mkdir()
    except OSError as refused:
        raise UnsupportedError(f"this user may not make a memory control group ({refused}); {_HOW}") from None
    try:
        try:
            for key, value in settings.items():
                (path / key).write_text(str(value))
        except OSError as refused:
            raise UnsupportedError(f"this user may not limit memory ({refused}); {_HOW}") from None
        yield Group(path, version)
    finally:
        path.rmdir()
