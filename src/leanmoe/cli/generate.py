"""What `run` and `chat` share: printing an answer as it is made, Ctrl-C, and the account of it."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

from rich.table import Table

from leanmoe.cli.live import PromptLine, StatusLine
from leanmoe.engine.answer import Completion, Stream
from leanmoe.engine.llm import LLM
from leanmoe.engine.memory import peak_bytes
from leanmoe.experts.stats import CacheStats
from leanmoe.units import format_bytes


@contextmanager
def interruptible(stream: Stream, prompt: PromptLine) -> Iterator[None]:
    """The first Ctrl-C ends the answer after the token being computed; a second one ends the command."""

    def cancel(signum: int, frame: FrameType | None) -> None:
        if stream.cancelled:
            raise KeyboardInterrupt
        stream.cancel()
        prompt.stopping()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        prompt.erase()


def show(llm: LLM, stream: Stream, *, silent: bool = False, live: bool = False) -> Completion:
    """Prints the answer's pieces as they come, unless `silent`; returns the whole. `live`: with a line of figures."""
    prompt = PromptLine()
    stream.watch_prompt(prompt.update)
    with interruptible(stream, prompt), StatusLine() if live else nullcontext() as line:
        before, prompted = llm.stats, time.perf_counter()
        for piece in stream:
            if stream.tokens == 1:
                before, prompted = llm.stats, time.perf_counter()
            if not silent:
                sys.stdout.write(piece)
                sys.stdout.flush()
            if line is not None and line.due:
                line.update(_so_far(llm, llm.stats - before, stream.tokens, time.perf_counter() - prompted))
    if not silent:
        print(flush=True)
    assert stream.completion is not None
    return stream.completion


def _so_far(llm: LLM, done: CacheStats, tokens: int, seconds: float) -> str:
    parts = [f"{tokens} tokens"]
    if tokens > 1:
        parts.append(f"{(tokens - 1) / seconds:.1f} tokens/s")
        if llm.spec.router is not None:
            parts.append(f"hit rate {done.hit_rate:.1%}")
            parts.append(f"read {format_bytes((done.read_bytes - done.warm_bytes) // (tokens - 1))} a token")
            parts.append(f"waited {done.stall_seconds:.1f} s")
        if llm.config.prefetch != "off":
            ahead = done.prefetch
            parts.append(
                f"ahead {ahead.useful} useful, {ahead.late} late, {ahead.wasted} wasted, {ahead.dropped} dropped"
            )
    return " | ".join(parts)


def table(llm: LLM, done: Completion) -> Table:
    """What the run took, a row for each figure."""
    usage, plan = done.usage, llm.plan
    decoded = usage.completion_tokens > 1  # the first token comes with the prompt
    rows = Table(show_header=False)
    rows.add_row("model size on disk", format_bytes(plan.experts + plan.trunk_bytes))
    rows.add_row("memory budget", format_bytes(plan.memory))
    rows.add_row("peak memory", format_bytes(peak_bytes()))
    if llm.spec.router is not None:
        rows.add_row("experts resident", f"{plan.residency:.1%}")
        if decoded:
            rows.add_row("hit rate", f"{usage.decode_experts.hit_rate:.1%}")
            rows.add_row("read for each token", format_bytes(round(usage.read_bytes_per_token)))
        rows.add_row("read for the prompt", format_bytes(usage.prompt_experts.read_bytes))
        if decoded:
            waited = usage.decode_experts.stall_seconds
            rows.add_row("waited for reads", f"{waited:.2f} s of {usage.decode_seconds:.2f} s")
        if llm.config.prefetch != "off":
            ahead = usage.decode_experts.prefetch
            rows.add_row(
                f"prefetch ({llm.config.prefetch})",
                f"{ahead.issued} read: {ahead.useful} useful, {ahead.late} late, {ahead.wasted} wasted; "
                f"{ahead.dropped} dropped; {format_bytes(ahead.read_bytes)}",
            )
    rows.add_row("prompt", f"{_counted(usage.prompt_tokens)}, {usage.prompt_rate:.1f} tokens/s")
    rows.add_row(
        "answer",
        _counted(usage.completion_tokens) + (f", {usage.decode_rate:.1f} tokens/s" if decoded else ""),
    )
    return rows


def _counted(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def summary(llm: LLM, done: Completion) -> str:
    """One line: speeds, hit rate, bytes read for each token, peak memory against the budget.

    Without the figures that an answer of one token, which comes with the prompt, does not have.
    """
    usage = done.usage
    decoded = usage.completion_tokens > 1
    parts = [
        f"prompt {_counted(usage.prompt_tokens - usage.reused_tokens)} at {usage.prompt_rate:.1f}/s",
        f"answer {_counted(usage.completion_tokens)}" + (f" at {usage.decode_rate:.1f}/s" if decoded else ""),
    ]
    if llm.spec.router is not None and decoded:
        parts.append(f"hit rate {usage.decode_experts.hit_rate:.1%}")
        parts.append(f"read {format_bytes(round(usage.read_bytes_per_token))} a token")
    parts.append(f"peak {format_bytes(peak_bytes())} of {format_bytes(llm.plan.memory)}")
    return " | ".join(parts)
