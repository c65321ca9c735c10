"""How much memory there is and how much this process uses, as the kernel counts it."""

import ctypes
import os
from pathlib import Path

_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


_M_MMAP_THRESHOLD = -3
_LARGE = 1 << 20


def return_large_blocks() -> None:
    """Has the C library give blocks above 1 MiB back to the kernel as soon as they are freed.

    Left alone, glibc keeps ever larger freed blocks, for each thread its own: in long prompts that came to 200 MiB
    that no plan names. Other C libraries, which lack this setting, are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def resident_bytes() -> int:
    """Bytes of this process in memory now (VmRSS): heap, libraries, everything."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most bytes that this process ever had in memory (VmHWM)."""
    return _status("VmHWM")


def cgroup_limit() -> int | None:
    """The memory limit of this process's control group, version 2 or 1; None without one."""
    limits = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = _CGROUP_V2, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = _CGROUP_V1, "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        while group != root.parent:
            try:
                text = (group / name).read_text().strip()
            except OSError:
                text = "max"
            if text != "max":
                limits.append(int(text))
            group = group.parent
    limit = min(limits, default=None)
    return (
        None if limit is None or limit >= _physical() else limit
    )  # version 1 writes "none" as a huge number


def _physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def machine_bytes() -> int:
    """The memory that this process could have if nothing else ran: the machine's, or its control group's."""
    return min(_physical(), cgroup_limit() or _physical())


def default_budget() -> int:
    """The process budget when none is given: nine tenths of what this process could still have.

    That is the control group's limit, or what it holds now plus what the machine has available.
    """
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024 + resident_bytes()
            break
    else:
        available = _physical()
    limit = cgroup_limit()
    return (available if limit is None else min(available, limit)) * 9 // 10
