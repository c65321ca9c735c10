"""lean and llama.cpp in turn on the same GGUF, prompt and memory limit: `python -m leanmoe.bench.compare`.

Every run is a process of its own in a control group with the limit and no swap, after the model's files have been
dropped from the page cache. Printed is a Markdown table of medians, with the counts that no clock disturbs.
"""

import argparse
import importlib.util
import json
import os
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanmoe.bench.cgroup import memory_limit
from leanmoe.errors import LeanError
from leanmoe.units import format_bytes, parse_bytes

PROMPT = (
    "The harbour was quiet before six. Two men were mending a net on the stones, and neither of them spoke until "
    "the ferry had turned the corner of the breakwater; then the older one said that the wind would go round to "
    "the north by noon, and that whoever meant to cross had better do it early."
)
Record = dict[str, Any]


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


def _run(command: Sequence[str], limit: int | None, prompt: Path) -> Record | str:
    """One cold run; the record it printed, or why there is none."""
    shell = ["sh", "-c", 'exec "$@" < "$0"', str(prompt), *command]
    with memory_limit(limit or 1 << 62) as group:
        done = group.run(shell)
        if group.killed():
            return "killed: out of memory"
    if done.returncode:
        return done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
    record: Record = json.loads(done.stdout.strip().splitlines()[-1])
    return record


def measure(
    pack: Path, gguf: Path, limits: Sequence[str], runs: int, tokens: int, context: int, prompt: Path
) -> list[Record]:
    """Alternating runs of both engines at each limit (a size or "none"); one record for each engine and limit, medians
    of `runs`. Raises `LeanError` if llama.cpp is not there to compare with."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise LeanError("llama.cpp is run through xllamacpp, which is not installed: pip install xllamacpp")
    sizes = {text: None if text == "none" else parse_bytes(text) for text in limits}
    lean = [
        sys.executable,
        "-m",
        "leanmoe",
        "run",
        str(pack),
        "-p",
        "-",
        "--raw",
        "--ignore-eos",
        "--temp",
        "0",
    ]
    lean += ["--json", "-n", str(tokens), "--context", str(context)]
    rival = [sys.executable, "-m", "leanmoe.bench.rival", str(gguf), str(tokens), str(context)]
    results = []
    for name, limit in sizes.items():
        taken: dict[str, list[Record | str]] = {"lean": [], "llama.cpp": []}
        for _ in range(runs):
            budget = [] if limit is None else ["--memory", str(limit)]
            for engine, command, files in (("lean", lean + budget, pack), ("llama.cpp", rival, gguf)):
                drop_from_page_cache(files)
                taken[engine].append(_run(command, limit, prompt))
                print(f"{engine} at {_shown(name)}: {_brief(taken[engine][-1])}", file=sys.stderr)
        results += [_median(engine, name, limit, records) for engine, records in taken.items()]
    return results


def _median(engine: str, name: str, limit: int | None, records: Sequence[Record | str]) -> Record:
    about = {"engine": engine, "limit": limit, "limit_name": name}
    failed = next((r for r in records if isinstance(r, str)), None)
    if failed is not None:
        return {**about, "failed": failed}
    good = [r for r in records if not isinstance(r, str)]
    keys = [k for k, v in good[0].items() if isinstance(v, int | float)]
    return {**about, **{k: statistics.median(r[k] for r in good) for k in keys}}


def _shown(limit: str) -> str:
    """A limit as it was given, but for a space: 1080MiB -> 1080 MiB."""
    return "no limit" if limit == "none" else re.sub(r"(\d)([A-Za-z])", r"\1 \2", limit.strip())


def _brief(record: Record | str) -> str:
    return record if isinstance(record, str) else f"{record['decode_tokens_per_second']:.2f} tokens/s"


def markdown(results: Sequence[Record]) -> str:
    """The table."""
    head = [
        "memory limit",
        "engine",
        "prompt, tokens/s",
        "answer, tokens/s",
        "peak memory",
        "resident",
        "hit rate",
    ]
    rows = [[*head, "read a token"], ["---"] * (len(head) + 1)]
    for r in results:
        row = [_shown(r["limit_name"]), r["engine"]]
        if "failed" in r:
            rows.append([*row, r["failed"], "", "", "", "", ""])
            continue
        row += [f"{r[k]:.1f}" for k in ("prompt_tokens_per_second", "decode_tokens_per_second")]
        row += [format_bytes(int(r["memory_peak"]))]
        if "hit_rate" in r:
            row += [
                f"{r['residency']:.0%}",
                f"{r['hit_rate']:.1%}",
                format_bytes(int(r["read_bytes_per_token"])),
            ]
        rows.append(row + [""] * (len(head) + 1 - len(row)))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    """Parses arguments, measures, prints."""
    parser = argparse.ArgumentParser(prog="python -m leanmoe.bench.compare", description=__doc__)
    parser.add_argument("pack", type=Path, help="the model as a pack")
    parser.add_argument("gguf", type=Path, help="the same model as a GGUF file")
    parser.add_argument(
        "--limits", default="none", help="memory limits, comma-separated, like 900MiB,2GiB,none"
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of each engine at each limit")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument(
        "--prompt", type=Path, help="file with the prompt (default: a paragraph of 70 tokens)"
    )
    parser.add_argument("--json", action="store_true", help="print records instead of a table")
    options = parser.parse_args()
    limits = [text.strip() for text in options.limits.split(",")]
    prompt = options.prompt
    if prompt is None:
        prompt = options.pack.parent / f".{options.pack.name}.prompt"
        prompt.write_text(PROMPT)
    try:
        results = measure(
            options.pack, options.gguf, limits, options.runs, options.tokens, options.context, prompt
        )
    finally:
        if options.prompt is None:
            prompt.unlink()
    print(json.dumps(results) if options.json else markdown(results))


if __name__ == "__main__":
    try:
        main()
    except LeanError as error:
        sys.exit(f"bench: {error}")
