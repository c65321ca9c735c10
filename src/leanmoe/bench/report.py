"""The comparison in writing: a table for the terminal, or a folder with Markdown, plots and records."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from leanmoe.bench.cgroup import DiskLimit
from leanmoe.bench.disk import DiskRate
from leanmoe.bench.figures import draw_all
from leanmoe.bench.programs import Program, Record
from leanmoe.bench.turns import RATES, Plan
from leanmoe.units import format_bytes

_HEAD = ["memory limit", "engine", "prompt, tokens/s", "decode, tokens/s", "whole run, s", "peak memory"]
_COUNTS = ["resident", "hit rate", "read a token", "disk while reading"]


def markdown(results: Sequence[Record]) -> str:
    """The table of medians."""
    rows = [[*_HEAD, *_COUNTS], ["---"] * (len(_HEAD) + len(_COUNTS))]
    for r in results:
        row = [r["limit_name"], _engine(r)]
        if "failed" in r:
            rows.append([*row, r["failed"], *[""] * (len(rows[0]) - 3)])
            continue
        row += [_rate(r, phase) for phase in ("prompt", "decode")]
        row += [f"{r['wall_seconds']:.1f}" if "wall_seconds" in r else ""]
        row += [format_bytes(int(r["memory_peak"])), *_counts(r)]
        rows.append(row)
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _engine(r: Record) -> str:
    return str(r["engine"]) + (f", {r['setting']}" if r["setting"] else "")


def _rate(r: Record, phase: str) -> str:
    """A rate; of a run that was cut short, that of what it finished, and how much that was."""
    rate = r.get(f"{phase}_tokens_per_second")
    if rate is None or not r.get(f"{phase}_tokens"):
        return "" if r["finished"] else "not finished"
    cut = "" if r["finished"] else f" (of {r[f'{phase}_tokens']:.0f} tokens, then cut short)"
    return f"{rate:.3g}{cut}" if rate < 1000 else f"{rate:.0f}{cut}"


def _counts(r: Record) -> list[str]:
    phase = "decode" if r.get("decode_tokens") else "prompt"
    if f"{phase}_hit_rate" not in r:
        return [""] * len(_COUNTS)
    read_rate = r[f"{phase}_read_rate"]
    return [
        f"{r['residency']:.0%}",
        f"{r[f'{phase}_hit_rate']:.1%}",
        format_bytes(int(r[f"{phase}_read_bytes"])),
        f"{format_bytes(int(read_rate))}/s" if read_rate else "",
    ]


def ratios(results: Sequence[Record]) -> str:
    """How many times as fast lean is as the best llama.cpp that answered, at each limit."""
    rows = [["memory limit", "prompt", "decode"], ["---"] * 3]
    for limit in dict.fromkeys(r["limit_name"] for r in results):
        here = [r for r in results if r["limit_name"] == limit]
        rows.append([limit, *(_ratio(here, rate) for rate in RATES)])
    return _table(rows)


def _ratio(here: Sequence[Record], rate: str) -> str:
    own = next((r for r in here if r["engine"] == "lean"), {})
    rivals = [r for r in here if r["engine"] != "lean"]
    if not own.get(rate):
        return str(own.get("failed", "not measured"))
    best = max((r for r in rivals if r.get(rate)), key=lambda r: r[rate], default=None)
    if best is not None:
        return f"{own[rate] / best[rate]:.2f} x ({best['setting']})"
    return "; ".join(dict.fromkeys(r.get("failed", "not finished") for r in rivals)) or "no rival"


def write_report(
    folder: Path,
    pack: Path,
    results: Sequence[Record],
    plan: Plan,
    programs: Sequence[Program],
    rival: str,
    disk: DiskRate | None,
    slow: DiskLimit | None = None,
) -> Path:
    """Writes report.md, records.json and the plots into `folder`; returns the report's path."""
    from leanmoe.bench.machine import (
        describe,
    )  # brings torch, which no process that starts others should hold

    folder.mkdir(parents=True, exist_ok=True)
    machine = describe(pack)
    if slow is not None:
        machine["disk, by the kernel's limit"] = f"{format_bytes(slow.rate)}/s of reads"
    about = {"machine": machine, "rival": rival, "disk": None if disk is None else asdict(disk)}
    (folder / "records.json").write_text(json.dumps({**about, "results": list(results)}, indent=1))
    plots = draw_all(folder, results)
    task = plan.task
    feed = "random tokens" if task.prompt is None else "the same text, continued greedily"
    parts = [
        f"# lean and llama.cpp on {pack.name}",
        f"{feed}: {task.prompt_tokens} tokens of prompt, then {task.tokens} one by one, {task.threads} threads, "
        f"context {task.context}. Medians of up to {plan.runs} turns; every run a process of its own with the files "
        "dropped from the page cache, in a control group without swap where there is a limit. Under a limit "
        "nothing is warmed up; "
        "without one, both engines hold all weights before the clock starts.",
        markdown(results),
        "lean against the fastest setting of llama.cpp:",
        ratios(results),
        *_notes(results),
        *(f"![{plot.stem.replace('-', ' ')}]({plot.name})" for plot in plots),
        "## Where a token's time goes",
        _times(results),
        *_starts(results),
        "## The machine",
        _table([["", ""], ["---"] * 2, *([k, v] for k, v in machine.items()), ["llama.cpp", rival]]),
        *([] if disk is None else [_about_disk(disk, results)]),
        "## Commands",
        "```\n"
        + "\n".join([shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]), *commands(plan, programs)])
        + "\n```",
    ]
    path = folder / "report.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _notes(results: Sequence[Record]) -> list[str]:
    """What a reader of the table must know: texts that differ, and runs that failed beside others that did not."""
    notes = []
    for limit in dict.fromkeys(r["limit_name"] for r in results):
        here = [r for r in results if r["limit_name"] == limit]
        texts = {_engine(r): r["text"].strip() for r in here if r.get("text")}
        if len(texts) > 1:
            shortest = min(len(text) for text in texts.values())
            same = len({text[:shortest] for text in texts.values()}) == 1
            notes.append(f"At {limit} the engines' texts are {'the same' if same else 'not the same'}.")
        counts = {r["prompt_tokens"] for r in here if r.get("prompt_tokens")}
        if len(counts) > 1:
            notes.append(f"At {limit} the engines counted different prompts: {sorted(counts)} tokens.")
        notes += [
            f"At {limit}, {_engine(r)}: {len(r['failures'])} of {len(r['failures']) + r['runs']} runs failed "
            f"({r['failures'][0]})."
            for r in here
            if r.get("failures")
        ]
    return notes


def _times(results: Sequence[Record]) -> str:
    rows = [["memory limit", "phase", "kernels, ms", "waiting for reads, ms", "rest, ms"], ["---"] * 5]
    for r in results:
        for phase in ("prompt", "decode"):
            if r.get(f"{phase}_tokens") and f"{phase}_kernel_seconds" in r:
                cells = [f"{1000 * r[f'{phase}_{part}_seconds']:.2f}" for part in ("kernel", "stall", "rest")]
                rows.append([r["limit_name"], phase, *cells])
    return _table(rows)


def _starts(results: Sequence[Record]) -> list[str]:
    """How long lean took to open the model, and what it holds beside weights and state."""
    return [
        f"At {r['limit_name']} lean opened the model (trunk {format_bytes(int(r['trunk_bytes']))}) in "
        f"{r['open_seconds']:.2f} s; its peak is {r['memory_beside'] / 1e6:.0f} MB above trunk, KV state and slots."
        for r in results
        if r.get("open_seconds")
    ]


def _about_disk(disk: DiskRate, results: Sequence[Record]) -> str:
    """The disk's rate, and the share of it that lean had while it was reading."""
    lines = [
        f"The disk gives {format_bytes(int(disk.rate))}/s in blocks of {format_bytes(disk.block)}, {disk.depth} at "
        f"once: {disk.how}. While it was reading, lean had:"
    ]
    for r in results:
        for phase in ("prompt", "decode"):
            if rate := r.get(f"{phase}_read_rate"):
                lines.append(
                    f"- {r['limit_name']}, {phase}: {format_bytes(int(rate))}/s, {rate / disk.rate:.0%} of that"
                )
    return "\n".join([lines[0], "", *lines[1:]])


def commands(plan: Plan, programs: Sequence[Program]) -> list[str]:
    """What is run at the first limit."""
    own, rival = programs
    limit = next(iter(plan.limits.values()))
    task = plan.task_at(limit)
    commands = [own.command(task, limit, None)]
    commands += [rival.command(task, limit, setting) for setting in plan.settings]
    return [shlex.join([Path(words[0]).name, *words[1:]]) for words in commands]
