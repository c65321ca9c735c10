"""The machine that figures come from, in words."""

import importlib.metadata
import os
import platform
from pathlib import Path

from leanmoe import __version__, kernels
from leanmoe.engine.memory import machine_bytes
from leanmoe.units import format_bytes


def describe(path: Path) -> dict[str, str]:
    """Processor, cores, memory, the disk that holds `path`, and versions."""
    return {
        "processor": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} processors",
        "instruction set of lean": f"{kernels.isa()} (here: {', '.join(kernels.available_isas())})",
        "memory": format_bytes(machine_bytes()),
        "disk": _disk(path),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "versions": ", ".join(
            [f"lean {__version__}", f"Python {platform.python_version()}", f"torch {_version('torch')}"]
        ),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _disk(path: Path) -> str:
    """The file system that holds `path`, and its device's model and queue where the kernel tells."""
    found, kind, device = "", "unknown", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        source, point, filesystem = line.split()[:3]
        if path.resolve().is_relative_to(point) and len(point) >= len(found):
            found, kind, device = point, filesystem, source
    words = [f"{kind} on {Path(device).name}"]
    number = os.stat(path).st_dev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    for folder in (block, block.parent):
        if (folder / "queue/rotational").exists():
            turning = (folder / "queue/rotational").read_text().strip() == "1"
            model = folder / "device/model"
            words += [model.read_text().strip()] if model.exists() else []
            words.append("reported as rotational" if turning else "solid state or virtual")
            break
    return ", ".join(words)
