"""Settings of lean against each other on one pack: `python -m leanmoe.bench.settings PACK LIMIT ARM...`

An arm is flags of `lean run` in one string, as "--prefetch auto". Arms take turns, in the opposite order every
other time; each run is a process of its own in a control group, with the pack's files dropped from the page
cache. Printed are medians of `--runs` runs: speeds, and the counts that no clock disturbs.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from leanmoe.bench.cgroup import limits
from leanmoe.bench.compare import PROMPT
from leanmoe.bench.turns import drop_from_page_cache
from leanmoe.errors import LeanError
from leanmoe.units import parse_bytes

Record = dict[str, Any]
_COLUMNS: dict[str, Callable[[Record], str]] = {
    "first token, s": lambda r: f"{r['prompt_seconds']:.2f}",
    "tokens/s": lambda r: f"{r['decode_tokens_per_second']:.2f}",
    "stall, s": lambda r: f"{r['stall_seconds']:.2f}",
    "decode, s": lambda r: f"{r['decode_seconds']:.2f}",
    "hit rate": lambda r: f"{r['hit_rate']:.1%}",
    "demand reads": lambda r: f"{r['decode_demand_reads']:.0f}",
    "read ahead": lambda r: f"{r['issued']:.0f}",
    "useful": lambda r: f"{r['useful']:.0f}",
    "late": lambda r: f"{r['late']:.0f}",
    "wasted": lambda r: f"{r['wasted']:.0f}",
    "peak MiB": lambda r: f"{r['memory_peak'] / 2**20:.0f}",
    "MiB read": lambda r: f"{r['decode_read_bytes'] / 2**20:.0f}",
}


def measure(pack: Path, limit: int, arms: Sequence[str], runs: int, tokens: int) -> dict[str, Record]:
    """The medians of each arm. Raises `LeanError` if a run fails, or two runs answer differently."""
    command = [sys.executable, "-m", "leanmoe", "run", str(pack), "-p", PROMPT, "--raw", "--ignore-eos"]
    command += ["--temp", "0", "--json", "-n", str(tokens), "--context", "1024", "--memory", str(limit)]
    taken: dict[str, list[Record]] = {arm: [] for arm in arms}
    for turn in range(runs):
        for arm in arms if turn % 2 == 0 else reversed(arms):
            drop_from_page_cache(pack)
            with limits(limit) as group:
                done = group.run([*command, *arm.split()])
            if done.returncode:
                raise LeanError(f"{arm}: exit code {done.returncode}: {done.stderr.strip()[-500:]}")
            record = json.loads(done.stdout.strip().splitlines()[-1])
            taken[arm].append(record | record.pop("prefetch"))
            load = os.getloadavg()[0]
            print(
                f"{arm}: {record['decode_tokens_per_second']:.2f} tokens/s, load {load:.1f}", file=sys.stderr
            )
    if len({record["text"] for records in taken.values() for record in records}) != 1:
        raise LeanError("the arms gave different answers")
    return {arm: _median(records) for arm, records in taken.items()}


def _median(records: Sequence[Record]) -> Record:
    keys = [key for key, value in records[0].items() if isinstance(value, int | float)]
    return {key: statistics.median(record[key] for record in records) for key in keys}


def markdown(results: dict[str, Record]) -> str:
    """The table."""
    head = ["setting", *_COLUMNS]
    rows = [[f"`{arm}`", *(show(record) for show in _COLUMNS.values())] for arm, record in results.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Settings of lean side by side under a memory limit.")
    parser.add_argument("pack", type=Path)
    parser.add_argument("limit", help="memory limit of each run, like 1GiB")
    parser.add_argument("arms", nargs="+", metavar="ARM", help='flags of lean run, like "--prefetch auto"')
    parser.add_argument("--runs", type=int, default=5, help="runs of each arm")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    options = parser.parse_args()
    print(
        markdown(
            measure(options.pack, parse_bytes(options.limit), options.arms, options.runs, options.tokens)
        )
    )


if __name__ == "__main__":
    try:
        main()
    except LeanError as error:
        sys.exit(f"bench: {error}")
