"""Taking turns: cold runs of two engines, settings tried, the best kept, medians taken."""

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leanmoe.bench.cgroup import DiskLimit, limits
from leanmoe.bench.programs import Program, Record, Setting, Task
from leanmoe.errors import LeanError

RATES = ("prompt_tokens_per_second", "decode_tokens_per_second")
Run = Callable[[Program, Task, int | None, Setting | None], "Record | str"]


def drop_from_page_cache(path: Path) -> None:
    """Has the kernel forget the clean pages of a file, or of every file below a directory."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def run_once(
    program: Program,
    task: Task,
    limit: int | None,
    setting: Setting | None,
    seconds: float,
    disk: DiskLimit | None = None,
) -> Record | str:
    """One cold run of at most `seconds`; its record, or why there is none."""
    drop_from_page_cache(program.files)
    with limits(limit, disk) as group:
        done = group.run(program.command(task, limit, setting), stdin=program.stdin(task), seconds=seconds)
        if group.killed():
            return "killed: out of memory"
    if done.returncode == -9 and done.in_time:
        return "killed (by the kernel, if memory was short)"
    try:
        if done.returncode and done.in_time:
            raise LeanError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        record = program.read(done)
    except LeanError as reason:
        return str(reason) if done.in_time else f"nothing finished in {seconds:.0f} s, loading included"
    return {"memory_peak": done.peak, **record, "wall_seconds": done.seconds}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. `limits` are sizes in bytes by how they are shown; None is no limit."""

    task: Task
    limits: dict[str, int | None]
    settings: tuple[Setting, ...]
    runs: int

    def task_at(self, limit: int | None) -> Task:
        """Under a limit nothing is warmed up."""
        return replace(self.task, warm=limit is None)


def measure(plan: Plan, own: Program, rival: Program, run: Run, say: Callable[[str], None]) -> list[Record]:
    """Alternating runs at each limit; a record for each engine, setting and limit: medians, or why it failed."""
    results: list[Record] = []
    for name, limit in plan.limits.items():
        task = plan.task_at(limit)
        taken: dict[tuple[Program, Setting | None], list[Record | str]] = {(own, None): []}
        taken |= {(rival, setting): [] for setting in plan.settings}
        going = list(taken)
        for turn in range(plan.runs):
            for program, setting in going:
                taken[program, setting].append(run(program, task, limit, setting))
                say(f"{_title(program, setting)} at {name}: {_brief(taken[program, setting][-1])}")
            if turn == 0:
                best = {best_of({s: taken[rival, s][0] for s in plan.settings}, rate) for rate in RATES}
                going = [(own, None), *((rival, s) for s in plan.settings if s in best)]
        for (program, setting), records in taken.items():
            about = {
                "engine": program.name,
                "setting": str(setting or ""),
                "limit": limit,
                "limit_name": name,
            }
            results.append({**about, **median(records)})
    return results


def best_of(tried: dict[Setting, Record | str], rate: str) -> Setting | None:
    """The setting with the highest `rate`; None if none has any."""
    rates = {s: r[rate] for s, r in tried.items() if not isinstance(r, str) and r.get(rate)}
    return max(rates, key=lambda s: rates[s]) if rates else None


def median(records: Sequence[Record | str]) -> Record:
    """Medians of all numbers, and how many runs they are of; `failed` if no run has a record."""
    good = [r for r in records if not isinstance(r, str)]
    failures = [r for r in records if isinstance(r, str)]
    if not good:
        return {"failed": failures[0], "runs": len(records)}
    numbers: dict[str, Any] = {}
    for key in dict.fromkeys(key for record in good for key in record):
        values = [
            r[key] for r in good if isinstance(r.get(key), int | float) and not isinstance(r[key], bool)
        ]
        if values:
            numbers[key] = statistics.median(values)
    kept: Record = {key: good[0][key] for key in ("text", "isa") if key in good[0]}
    finished = all(r.get("finished", True) for r in good)
    return {**numbers, **kept, "finished": finished, "runs": len(good), "failures": failures}


def _title(program: Program, setting: Setting | None) -> str:
    return program.name + (f" ({setting})" if setting else "")


def _brief(record: Record | str) -> str:
    if isinstance(record, str):
        return record
    rates = [f"{record[rate]:.2f}" if record.get(rate) else "-" for rate in RATES]
    return f"prompt {rates[0]}, decode {rates[1]} tokens/s" + (
        "" if record.get("finished", True) else " (cut short)"
    )
