"""lean and llama.cpp in turn on the same model, prompt and memory limit: `python -m leanmoe.bench.compare`.

Every run is a process of its own, in a control group with the limits and no swap, after the model's files have been
dropped from the page cache. Under a limit nothing is warmed up; without one, both engines hold all weights before the
clock starts. Settings of llama.cpp are all tried in the first turn; the best go on. Printed are medians, and with
`--report` written as Markdown with plots.
"""

import argparse
import json
import os
import random
import re
import sys
from pathlib import Path

from leanmoe.bench.cgroup import DiskLimit, limits
from leanmoe.bench.disk import measure_disk
from leanmoe.bench.programs import Lean, Program, Record, Setting, Task, find_rival
from leanmoe.bench.report import markdown, write_report
from leanmoe.bench.turns import Plan, measure, run_once
from leanmoe.cli.plots import require_matplotlib
from leanmoe.errors import LeanError, UsageError
from leanmoe.pack import open_pack
from leanmoe.text import Tokenizer
from leanmoe.units import parse_bytes

PROMPT = (
    "The harbour was quiet before six. Two men were mending a net on the stones, and neither of them spoke until "
    "the ferry had turned the corner of the breakwater; then the older one said that the wind would go round to "
    "the north by noon, and that whoever meant to cross had better do it early."
)
SETTINGS = "mmap,mmap+repack,none"


def prompt_text(pack: Path, tokens: int) -> str:
    """`tokens` words, as near as they can be counted, from the vocabulary of the model, always the same ones."""
    tokenizer = Tokenizer.from_metadata(open_pack(pack).trunk.metadata)
    draw = random.Random(0)
    words: list[str] = []
    for _ in range(50 * tokens):
        text = tokenizer.decode([draw.randrange(tokenizer.vocab_size)])
        if re.fullmatch(r" [a-z]{2,}", text):
            words.append(text)
        if len(words) == tokens:
            break
    text = "".join(words).lstrip() or PROMPT
    while len(ids := tokenizer.encode(text)) > tokens and len(ids) > 1:
        text = text[: max(1, len(text) * tokens // len(ids) - 1)]
    return text


def _limits(text: str) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for part in (p.strip() for p in text.split(",")):
        shown = "no limit" if part == "none" else re.sub(r"(\d)([A-Za-z])", r"\1 \2", part)
        found[shown] = None if part == "none" else parse_bytes(part)
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m leanmoe.bench.compare", description=__doc__)
    add = parser.add_argument
    add("pack", type=Path, help="the model as a pack")
    add("gguf", type=Path, help="the same model as a GGUF file")
    add("--limits", default="none", help="memory limits, comma-separated, like 900MiB,2GiB,none")
    add("--runs", type=int, default=3, help="turns at each limit")
    add("--tokens", type=int, default=64, help="tokens decoded; 0 measures the prompt alone")
    add("--prompt", type=Path, help="file with the prompt (default: a paragraph)")
    add(
        "--prompt-tokens",
        type=int,
        help="so many words of the model's vocabulary instead; 0: as short as can be",
    )
    add(
        "--random",
        action="store_true",
        help="random tokens, by llama-bench, instead of text and its continuation",
    )
    add("--context", type=int, help="(default: what is needed)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--llama-bench", type=Path, help="(default: the one on the path, else xllamacpp)")
    add("--settings", default=SETTINGS, help=f"llama.cpp's, to be tried (default: {SETTINGS})")
    add("--rival-args", default="", help="more arguments for llama.cpp's program, in one string")
    add("--seconds", type=float, default=600, help="after which a run is interrupted")
    add("--disk", action="store_true", help="measure the disk as well, with fio if it is there")
    add("--disk-limit", help="bytes a second that any run may read from the pack's disk, like 500MB")
    add("--report", type=Path, help="directory for report.md, plots and records")
    add("--json", action="store_true", help="print records instead of a table")
    return parser.parse_args()


def _task(options: argparse.Namespace, prompt: Path) -> Task:
    """The task of the command line; its text is written to `prompt`, unless it has a file of its own."""
    if options.tokens < 0 or (options.prompt_tokens or 0) < 0:
        raise UsageError("--tokens and --prompt-tokens count tokens; wanted 0 or more")
    if options.random:
        tokens = 512 if options.prompt_tokens is None else options.prompt_tokens
        if not tokens and not options.tokens:
            raise UsageError("nothing to measure: --tokens and --prompt-tokens are both 0")
        needed = max(tokens, options.tokens + 1)
        return Task(None, tokens, options.tokens, options.context or needed, options.threads, False)
    if options.prompt is None:
        count = options.prompt_tokens
        prompt.write_text(PROMPT if count is None else prompt_text(options.pack, max(1, count)))
    else:
        prompt = options.prompt
    tokens = len(Tokenizer.from_metadata(open_pack(options.pack).trunk.metadata).encode(prompt.read_text()))
    context = options.context or tokens + options.tokens + 1
    return Task(prompt.absolute(), tokens, options.tokens, context, options.threads, False)


def main() -> None:
    """Parses arguments, measures, prints, and writes the report."""
    options = _arguments()
    memory = _limits(options.limits)
    settings = tuple(Setting.parse(text) for text in options.settings.split(","))
    extra = options.rival_args.split()
    rival, about = find_rival(options.gguf, options.llama_bench, text=not options.random, extra=extra)
    own = Lean(options.pack)
    if options.report:
        require_matplotlib()
    slow = None
    if options.disk_limit:
        slow = DiskLimit.of(options.pack, parse_bytes(options.disk_limit))
        if DiskLimit.of(options.gguf, slow.rate) != slow:
            raise UsageError(
                f"{options.gguf} is on another disk than {options.pack}: only one may be limited"
            )
    for size in {*memory.values()}:
        with limits(size, slow):  # says now, not after minutes, if it may not be limited
            pass
    disk = measure_disk(options.pack, limit=slow) if options.disk else None
    prompt = options.pack.parent / f".{options.pack.name}.{os.getpid()}.prompt"
    try:
        plan = Plan(_task(options, prompt), memory, settings, options.runs)

        def run(program: Program, task: Task, limit: int | None, setting: Setting | None) -> Record | str:
            return run_once(program, task, limit, setting, options.seconds, slow)

        results = measure(plan, own, rival, run, lambda line: print(line, file=sys.stderr, flush=True))
    finally:
        prompt.unlink(missing_ok=True)
    print(json.dumps(results) if options.json else markdown(results))
    if options.report:
        written = write_report(options.report, options.pack, results, plan, [own, rival], about, disk, slow)
        print(f"written: {written}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except LeanError as error:
        sys.exit(f"bench: {error}")
