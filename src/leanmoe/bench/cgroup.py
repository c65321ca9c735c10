"""Running a command under limits of memory, without swap, and of its reads from the disk, which the kernel enforces.

By control groups, version 1 or 2.
"""

import math
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from leanmoe.errors import UnsupportedError, UsageError

_V2 = Path("/sys/fs/cgroup")
_V1_MEMORY, _V1_DISK = _V2 / "memory", _V2 / "blkio"
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
class DiskLimit:
    """At most `rate` bytes a second are read from the disk `device` ("major:minor")."""

    device: str
    rate: int

    @classmethod
    def of(cls, path: Path, rate: int) -> "DiskLimit":
        """For the disk that `path` lies on. Raises `UnsupportedError` if it is none, `UsageError` for no file."""
        try:
            number = path.stat().st_dev
        except OSError as error:
            raise UsageError(
                f"{path}: {error.strerror}; a file on the disk to be limited was wanted"
            ) from None
        block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
        if not block.exists():
            raise UnsupportedError(
                f"{path} lies on no disk whose rate can be limited, but on device {block.name}; a file system "
                "directly on a disk or a partition was wanted"
            )
        if (block / "partition").exists():
            block = block.resolve().parent
        return cls((block / "dev").read_text().strip(), rate)


@dataclass(frozen=True, slots=True)
class Group:
    """Control groups made for one measurement or test, one of each version 1 controller; without `paths`, none."""

    paths: tuple[Path, ...]

    def run(
        self, command: Sequence[str], *, stdin: Path | None = None, seconds: float = math.inf
    ) -> Finished:
        """Runs `command` inside the group, output captured; the limit covers it from its first instruction.

        After `seconds` it gets SIGINT as from Ctrl-C, and SIGKILL if it goes on for another minute.
        """
        for path in self.paths:
            script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
            command = ["sh", "-c", script, str(path), *command]
        source = Path(os.devnull) if stdin is None else stdin
        with source.open("rb") as given, TemporaryFile() as out, TemporaryFile() as err:
            begun = time.perf_counter()
            process = subprocess.Popen(
                command,
                stdin=given,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=_interruptible,
            )
            in_time, status, peak = _wait(process, begun, seconds)
            taken = time.perf_counter() - begun
            for file in (out, err):
                file.seek(0)
            printed, complained = (file.read().decode(errors="replace") for file in (out, err))
        return Finished(status, printed, complained, taken, peak, in_time)

    def killed(self) -> int:
        """How often the kernel killed a process of the group for want of memory."""
        for file in (path / name for path in self.paths for name in ("memory.events", "memory.oom_control")):
            for line in file.read_text().splitlines() if file.exists() else ():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0


def _interruptible() -> None:
    """Undoes what a command would inherit from a shell's background job, which ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


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


def nearest_with(root: Path, own: str, controllers: Collection[str]) -> Path:
    """The innermost group, from `own` up to `root`, that may limit new groups in it by these `controllers`.

    Version 2 allows that only in groups whose processes are all in inner ones, which a shell's own is not.
    Raises `UnsupportedError` if this user may use none of them.
    """
    group = root / own
    for parent in (group, *group.parents):
        enabled = parent / "cgroup.subtree_control"
        if (
            enabled.exists()
            and {*controllers} <= {*enabled.read_text().split()}
            and os.access(parent, os.W_OK)
        ):
            return parent
        if parent == root:
            break
    how = "run as root" if "io" in controllers else _HOW  # users are seldom given that one
    what = " and ".join(controllers)
    raise UnsupportedError(f"no group from {group} upwards lets this user limit {what}; {how}")


@contextmanager
def limits(memory: int | None, disk: DiskLimit | None = None) -> Iterator[Group]:
    """A group limited to so many bytes of memory, without swap, and to a disk's rate. None limits nothing.

    Raises `UnsupportedError`, saying what is missing, where none may be made.
    """
    name = f"lean-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    with ExitStack() as made:
        wanted = _wanted(memory, disk, name)
        for path, settings in wanted.items():
            try:
                path.mkdir()
            except OSError as refused:
                raise UnsupportedError(
                    f"this user may not make a control group ({refused}); {_HOW}"
                ) from None
            made.callback(path.rmdir)
            try:
                for key, value in settings.items():
                    (path / key).write_text(value)
            except OSError as refused:
                raise UnsupportedError(f"this user may not set a limit ({refused}); {_HOW}") from None
        yield Group(tuple(wanted))


def _wanted(memory: int | None, disk: DiskLimit | None, name: str) -> dict[Path, dict[str, str]]:
    """The groups to be made, with what is to be written to their files."""
    if (_V2 / "cgroup.controllers").exists():
        settings = {}
        if memory is not None:
            settings = {"memory.max": str(memory), "memory.swap.max": "0"}
        if disk is not None:
            settings["io.max"] = f"{disk.device} rbps={disk.rate}"
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        controllers = sorted({key.partition(".")[0] for key in settings}, reverse=True)
        return {nearest_with(_V2, own, controllers) / name: settings} if settings else {}
    groups = {}
    if memory is not None:
        groups[_V1_MEMORY / name] = {"memory.limit_in_bytes": str(memory), "memory.swappiness": "0"}
    if disk is not None:
        groups[_V1_DISK / name] = {"blkio.throttle.read_bps_device": f"{disk.device} {disk.rate}"}
    for path in groups:
        if not (path.parent / "cgroup.procs").exists():
            raise UnsupportedError(
                f"no control groups in {path.parent}: mount them, or give the container access to the host's"
            )
    return groups
