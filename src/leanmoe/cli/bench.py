"""`lean bench`: how fast a pack runs here, as llama-bench measures it."""

import json
import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from leanmoe.cli import options as opt
from leanmoe.engine.config import EngineConfig
from leanmoe.errors import LeanError, UsageError
from leanmoe.units import format_bytes

if TYPE_CHECKING:
    from leanmoe.engine.speed import Feed, Speed, Test

_WIDTH = 140  # of the table in a file, which has no width of its own


@opt.bench_flags
def bench(
    pack: Annotated[Path, typer.Argument(help="A .lmpack directory, made by `lean pack`.")],
    configs: list[EngineConfig],
    prompts: Annotated[
        str, typer.Option("--prompt-tokens", "-p", help="Lengths of prompts, comma-separated; 0 for none.")
    ] = "512",
    decodes: Annotated[
        str, typer.Option("--decode-tokens", "-n", help="Numbers of tokens fed one by one; 0 for none.")
    ] = "128",
    depths: Annotated[
        str,
        typer.Option(
            "--depth",
            "-d",
            help="How many tokens are in the context before, comma-separated; each is fed once.",
        ),
    ] = "0",
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", help="Of each test.", min=1)] = 5,
    warm_up: Annotated[
        bool, typer.Option("--warmup/--no-warmup", help="One more first, from an empty expert cache, apart.")
    ] = True,
    random: Annotated[
        bool, typer.Option("--random", help="Feed random tokens one by one, not the likeliest next.")
    ] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Measure prompt (pp) and decode (tg) speed. Each test runs in a process of its own, with nothing in memory.

    All its depths follow each other there, the least first.
    """
    from leanmoe.engine.speed import Test

    ahead = _numbers("--depth", depths)
    tests = [[Test("prompt", n, d) for d in ahead] for n in _numbers("--prompt-tokens", prompts) if n]
    tests += [[Test("decode", n, d) for d in ahead] for n in _numbers("--decode-tokens", decodes) if n]
    if not tests:
        raise UsageError("nothing to measure: both -p and -n are 0")
    rows = len(configs) * len(tests) * len(ahead)
    console = Console(stderr=True)
    with console.status("measuring") as status:
        found = []
        for config, speed in _measured(
            pack, configs, tests, repetitions, warm_up, "random" if random else "greedy"
        ):
            found.append((config, speed))
            status.update(f"{speed.test.name}: {speed.rate:.2f} tokens/s; {len(found)} of {rows}")
    if as_json:
        print(json.dumps([{"memory": config.memory, **speed.record()} for config, speed in found]))
    else:
        _show(found)


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0:
        raise UsageError(f"{flag} is '{text}'; wanted numbers of tokens, comma-separated, like 128,512")
    return numbers


def _measured(
    pack: Path,
    configs: Sequence[EngineConfig],
    tests: Sequence[Sequence["Test"]],
    repetitions: int,
    warm_up: bool,
    feed: "Feed",
) -> Iterator[tuple[EngineConfig, "Speed"]]:
    """Each test with each budget, in a new process: the kernel keeps the peak of a process as long as it lives.

    Depths of one test share theirs. They go up, and so does the peak.
    """
    from leanmoe.engine.speed import measure_all

    new = multiprocessing.get_context("spawn")
    for config in configs:
        for depths in tests:
            with ProcessPoolExecutor(1, mp_context=new, initializer=_end_at_once) as process:
                task = process.submit(
                    measure_all, pack, config, depths, repetitions=repetitions, warm_up=warm_up, feed=feed
                )
                try:
                    for speed in task.result():
                        yield config, speed
                except BrokenProcessPool:
                    raise LeanError(
                        f"{depths[0].name}: the process was killed, perhaps for want of memory"
                    ) from None


def _end_at_once() -> None:
    """Ctrl-C, which reaches every process, is for the one that waits to report."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _show(found: Sequence[tuple[EngineConfig, "Speed"]]) -> None:
    console, (_, any_speed) = Console(highlight=False), found[0]
    if not console.is_terminal:
        console.width = _WIDTH
    size = format_bytes(any_speed.model_bytes)
    console.print(
        f"{any_speed.model}, {size}, {any_speed.threads} threads, {any_speed.isa}; ms of a token",
        soft_wrap=True,
    )
    routed = any_speed.experts.total.lookups > 0
    reads = any(speed.experts.read_bytes for _, speed in found)
    cold = any(speed.first_rate is not None for _, speed in found)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    heads = ["memory", "test", "tokens/s", *(["from cold"] if cold else []), *(["hits"] if routed else [])]
    heads += ["read/token", "disk"] if reads else []
    for name in (*heads, "kernels", "reads", "rest", "peak"):
        table.add_column(name, justify="left" if name in ("memory", "test") else "right", no_wrap=True)
    for config, speed in found:
        experts = speed.experts
        row = ["none" if config.memory is None else format_bytes(config.memory), speed.test.name]
        row.append(f"{speed.rate:.2f} ± {speed.deviation:.2f}")
        if cold:
            row.append("" if speed.first_rate is None else f"{speed.first_rate:.2f}")
        if routed:
            row.append(f"{experts.hit_rate:.1%}")
        if reads:
            rate = f"{format_bytes(int(experts.read_rate))}/s" if experts.reading_seconds else ""
            row += [format_bytes(round(speed.read_bytes)), rate]
        row += [f"{1000 * s:.2f}" for s in (speed.kernel_seconds, speed.stall_seconds, speed.rest_seconds)]
        table.add_row(*row, format_bytes(speed.peak))
    console.print(table)
    anew = [speed.test.name for _, speed in found if speed.context_fed > speed.test.depth]
    if anew:
        console.print(
            f"{', '.join(dict.fromkeys(anew))}: recurrent layers cannot be cut after a prompt, so the context was fed "
            "anew for each repetition",
            soft_wrap=True,
        )
