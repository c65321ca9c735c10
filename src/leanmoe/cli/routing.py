"""`lean profile` and `lean trace`: text and prompts go through a model, and its routing is kept."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from leanmoe.cli import options as opt
from leanmoe.engine.config import EngineConfig
from leanmoe.engine.sample import PROMPTS, TEXT
from leanmoe.engine.tuning import TRACE
from leanmoe.errors import FormatError, UsageError
from leanmoe.experts.policy import Phase
from leanmoe.experts.trace import RoutingTrace
from leanmoe.experts.trace_csv import export_csv

if TYPE_CHECKING:
    from leanmoe.engine.llm import LLM

_RECORDING_BYTES = 64 << 20

Texts = Annotated[
    list[Path] | None, typer.Option("--text", metavar="FILE", help="Text to read; may be repeated.")
]
Prompts = Annotated[
    Path | None, typer.Option("--prompts", metavar="FILE", help="Prompts to answer, one on each line.")
]
Tokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens of each answer.", min=1)]


@opt.engine_flags
def profile(
    pack: Annotated[Path, typer.Argument(help="A .lmpack directory, made by `lean pack`.")],
    config: EngineConfig,
    text: Texts = None,
    prompts: Prompts = None,
    max_tokens: Tokens = 64,
) -> None:
    """Run text through a model and add its routing to the pack's profile. Without text: a sample of many kinds."""
    if not config.learn:
        raise UsageError("--no-learn leaves `lean profile` nothing to do")
    trace, whole = _run(pack, config, text, prompts, max_tokens)
    print(f"{pack}: learned from {_described(trace)}{'' if whole else ' (the rest did not fit the record)'}")
    print(_concentration(trace))


@opt.engine_flags
def trace(
    pack: Annotated[Path, typer.Argument(help="A .lmpack directory, made by `lean pack`.")],
    config: EngineConfig,
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="TRACE", help="The trace to write. [default: the pack's own, for tune and plan]"
        ),
    ] = None,
    text: Texts = None,
    prompts: Prompts = None,
    max_tokens: Tokens = 64,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Keep the routers' full output, for the policy `router`.")
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Write `route_trace v1` CSV.")] = False,
) -> None:
    """Record which experts each token uses. Without text: the routing of a sample of many kinds."""
    if csv and probabilities:
        raise UsageError("a CSV trace has no place for --probabilities")
    config = replace(config, record_probabilities=probabilities)
    found, whole = _run(pack, config, text, prompts, max_tokens)
    target = out or pack / TRACE
    if csv:
        export_csv(found, target)
    else:
        found.save(target)
    print(f"{target}: {_described(found)}{'' if whole else ' (the rest did not fit the record)'}")


def _run(
    pack: Path, config: EngineConfig, texts: list[Path] | None, prompts: Path | None, max_tokens: int
) -> tuple[RoutingTrace, bool]:
    """The routing of all the text and prompts, and whether all of it was recorded."""
    from leanmoe.engine.llm import LLM

    # What is wrong with the files should be said before the model is loaded.
    read = [_text(path) for path in texts or ()]
    asked = [line for line in _text(prompts).splitlines() if line.strip()] if prompts else []
    if prompts and not asked:
        raise FormatError(f"{prompts}: has no prompt; wanted one on each line")
    if not texts and not prompts:
        read, asked = [TEXT], list(PROMPTS)
    with LLM(pack, **asdict(replace(config, recording=_RECORDING_BYTES))) as llm:
        if llm.spec.router is None:
            raise UsageError(f"{pack}: a model without experts has no routing")
        windows = [window for part in read for window in _windows(llm, part)]
        with _progress(len(windows) + len(asked)) as step:
            for window in windows:
                llm.generate(window, max_tokens=1, temperature=0)
                step()
            for prompt in asked:
                _answer(llm, prompt, max_tokens)
                step()
    trace = llm.trace()
    return trace, not llm.recording_full


def _windows(llm: "LLM", text: str) -> Iterator[list[int]]:
    """The tokens of `text`, in pieces that the context holds."""
    tokens = llm.tokenizer.encode(text, parse_special=False)
    for begin in range(0, len(tokens), llm.plan.context):
        yield tokens[begin : begin + llm.plan.context]


def _answer(llm: "LLM", prompt: str, max_tokens: int) -> None:
    if llm.has_chat_template:
        llm.chat([{"role": "user", "content": prompt}], max_tokens=max_tokens, temperature=0)
    else:
        llm.generate(prompt, max_tokens=max_tokens, temperature=0)


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None


def _described(trace: RoutingTrace) -> str:
    tokens = trace.tokens
    return f"{tokens[Phase.PREFILL]} tokens read and {tokens[Phase.DECODE]} answered, {trace.picks} picks"


def _concentration(trace: RoutingTrace) -> str:
    """How unevenly the experts are used, which is what a cache lives on."""
    counts: dict[tuple[int, int], int] = {}
    for request in trace.requests():
        for expert in request.experts:
            counts[request.layer, expert] = counts.get((request.layer, expert), 0) + 1
    ordered = sorted(counts.values(), reverse=True)
    experts = sum(facts.experts for facts in trace.layers.values())
    shares = (
        f"{sum(ordered[: experts * share // 100]) / sum(ordered):.0%} on the hottest {share}%"
        for share in (10, 25, 50)
    )
    return f"of the requests for an expert, {', '.join(shares)} of {experts}; {len(ordered)} were used at all"


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[], None]]:
    console = Console(stderr=True)
    columns = (
        TextColumn("routing"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("routing", total=steps)
        yield lambda: bar.advance(task)
