"""What the disk gives for reads like lean's: whole expert files, past the page cache, several at once."""

import json
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path

from leanmoe.bench.cgroup import DiskLimit, limits
from leanmoe.engine.config import DEFAULT_READERS
from leanmoe.errors import LeanError, UsageError
from leanmoe.pack import open_pack

_FIO_SECONDS = 10
_FILES = 300  # that fio reads from, spread over the pack; it takes no longer list


@dataclass(frozen=True, slots=True)
class DiskRate:
    """Bytes per second with blocks of `block` bytes, `depth` at once, as measured by `how`."""

    rate: float
    block: int
    depth: int
    how: str


def measure_disk(pack_path: Path, depth: int = DEFAULT_READERS, limit: DiskLimit | None = None) -> DiskRate:
    """The rate of fio where it is installed, else that of lean's own reader threads.

    Raises `LeanError` if the pack has no experts, if fio fails, or if it is missing and there is a limit.
    """
    pack = open_pack(pack_path)
    layers = pack.manifest.layers
    if not layers:
        raise LeanError(f"{pack_path}: a model without experts has no expert files to read")
    block = statistics.median_low([m.layout.file_bytes for m in layers])
    fio = shutil.which("fio")
    if fio is None:
        if limit is not None:
            raise UsageError("fio is not installed; it is wanted to measure a disk that is limited")
        from leanmoe.engine.tune import read_rates

        rates = read_rates(pack)
        return DiskRate(rates[depth], block, depth, "lean's own reader threads (fio is not installed)")
    same = [m for m in layers if m.layout.file_bytes == block]
    root = (pack_path / "experts").absolute()
    files = [
        pack.expert_path(m.layer, e).absolute().relative_to(root) for m in same for e in range(m.expert_count)
    ]
    chosen = files[:: max(1, len(files) // _FILES)][:_FILES]
    with limits(None, limit) as group:
        done = group.run(fio_command(fio, root, chosen, block, depth))
    if done.returncode:
        raise LeanError(f"fio failed: {(done.stderr.strip() or done.stdout.strip())[:500]}")
    return DiskRate(fio_rate(done.stdout), block, depth, f"fio, psync, {depth} jobs, O_DIRECT, random files")


def fio_command(fio: str, root: Path, files: list[Path], block: int, depth: int) -> list[str]:
    """fio reading whole files of `block` bytes, named from `root`: `depth` threads that each read one at a time."""
    names = ":".join(map(str, files))
    shape = [f"--bs={block}", f"--filesize={block}", f"--numjobs={depth}", "--file_service_type=random:1"]
    how = ["--rw=read", "--direct=1", "--ioengine=psync", "--readonly", "--openfiles=16", "--invalidate=1"]
    ends = ["--time_based", f"--runtime={_FIO_SECONDS}", "--group_reporting", "--output-format=json"]
    return [fio, "--name=experts", f"--directory={root}", f"--filename={names}", *shape, *how, *ends]


def fio_rate(output: str) -> float:
    """Bytes per second in the JSON that fio printed."""
    try:
        jobs = json.loads(output[output.index("{") :])["jobs"]
        return float(jobs[0]["read"]["bw_bytes"])
    except (ValueError, KeyError, IndexError) as error:
        raise LeanError(f"fio printed no rate: {error}") from None
