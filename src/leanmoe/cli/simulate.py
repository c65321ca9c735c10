"""`lean simulate`: what every policy would have hit on a routing trace, at every budget."""

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from leanmoe.cli.plots import draw_curves, require_matplotlib
from leanmoe.cli.trace_commands import read_trace
from leanmoe.errors import BudgetError, FormatError, UsageError
from leanmoe.experts import simulate as simulator
from leanmoe.experts.policy import POLICIES, Phase, policy_named
from leanmoe.experts.predict import Transitions
from leanmoe.experts.recall import recalls
from leanmoe.experts.simulate import Replay
from leanmoe.experts.trace import Request, RoutingTrace
from leanmoe.units import format_bytes, parse_bytes

_BUDGETS = "3%,6%,12%,18%,24%,36%,50%"
_BEST = "belady"


class Accounting(Enum):
    """What a budget buys: slots of each expert size, as in lean's cache, or one pool of bytes."""

    SLOTS = "slots"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A table: for each policy, a replay for each budget, or None where the budget is below the floor."""

    trace: RoutingTrace
    budgets: list[int]
    replays: dict[str, list[Replay | None]]
    recall: Mapping[str, list[float]]
    recall_budgets: list[int]

    @property
    def residency(self) -> list[float]:
        return [budget / self.trace.expert_bytes for budget in self.budgets]


def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A routing trace, lean's own or CSV.")],
    policies: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help=f"Of {', '.join(POLICIES)}. [default: all the trace can feed]"),
    ] = None,
    budgets: Annotated[
        str, typer.Option(metavar="SIZES", help="Shares of all expert bytes or sizes, like 12%,2000MiB.")
    ] = _BUDGETS,
    accounting: Annotated[
        Accounting, typer.Option(help="What a budget buys: slots by expert size, or bytes for any expert.")
    ] = Accounting.SLOTS,
    decode_only: Annotated[
        bool, typer.Option("--decode-only", help="Leave the prompt out: begin with an empty cache.")
    ] = False,
    predictors: Annotated[bool, typer.Option(help="Also replay the predictors.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One machine-readable record.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the curves, like out.png.")] = None,
) -> None:
    """Replay a routing trace through every policy and budget, beside the best possible."""
    if plot:
        require_matplotlib()
    found = read_trace(trace)
    requests = [r for r in found.requests() if not decode_only or r.phase is Phase.DECODE]
    if not any(r.phase is Phase.DECODE for r in requests):
        raise FormatError(
            f"{trace} has no decoded token, and hit rates are those of decoding; record a longer one"
        )
    names = _policy_names(policies, found)
    sizes = [_budget(text, found.expert_bytes) for text in budgets.split(",")]
    run = _run_in_slots if accounting is Accounting.SLOTS else _run_in_bytes
    replays: dict[str, list[Replay | None]] = {name: [] for name in (*names, _BEST)}
    for name, size in itertools.product(replays, sizes):
        try:
            replays[name].append(run(name, requests, found, size))
        except BudgetError:
            replays[name].append(None)
    widths = [found.top_k * n for n in (1, 2, 4)]
    recall = recalls(found, widths) if predictors else {}
    outcome = _Outcome(found, sizes, replays, recall, widths)
    if as_json:
        print(json.dumps(_record(outcome, accounting)))
    else:
        _show(outcome, trace)
    if plot:
        draw_curves(plot, found.model, outcome.residency, _hit_rates(outcome))


def _policy_names(text: str | None, trace: RoutingTrace) -> list[str]:
    if text is None:
        return [n for n, kind in POLICIES.items() if trace.has_probabilities or not kind.wants_router]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if policy_named(name).wants_router and not trace.has_probabilities:
            raise UsageError(f"policy '{name}' needs router probabilities, which this trace does not have")
    return list(dict.fromkeys(names))


def _budget(text: str, whole: int) -> int:
    if match := re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,4})?)\s*%\s*", text):
        if not 0 < float(match[1]) <= 100:
            raise UsageError(f"a budget of '{text}' is not between 0% and 100% of the experts")
        return int(whole * float(match[1]) / 100)
    return parse_bytes(text)


def _run_in_slots(name: str, requests: list[Request], trace: RoutingTrace, budget: int) -> Replay:
    plan = simulator.plan_for(trace, budget)
    if name == _BEST:
        return simulator.replay_best(requests, plan)
    return simulator.replay(requests, plan, policy_named(name), _predictor(name, trace))


def _run_in_bytes(name: str, requests: list[Request], trace: RoutingTrace, budget: int) -> Replay:
    if name == _BEST:
        return simulator.replay_best_in_bytes(requests, trace, budget)
    return simulator.replay_in_bytes(requests, trace, budget, policy_named(name), _predictor(name, trace))


def _predictor(name: str, trace: RoutingTrace) -> Transitions | None:
    experts = {i: facts.experts for i, facts in trace.layers.items()}
    return Transitions(experts) if policy_named(name).wants_predictions else None


def _hit_rates(outcome: _Outcome) -> dict[str, list[float | None]]:
    return {n: [None if r is None else r.hit_rate for r in row] for n, row in outcome.replays.items()}


def _record(outcome: _Outcome, accounting: Accounting) -> dict[str, Any]:
    trace, tokens = outcome.trace, outcome.trace.tokens
    return {
        "model": trace.model,
        "architecture": trace.architecture,
        "accounting": accounting.value,
        "prefill_tokens": tokens[Phase.PREFILL],
        "decode_tokens": tokens[Phase.DECODE],
        "expert_bytes": trace.expert_bytes,
        "budgets": outcome.budgets,
        "residency": outcome.residency,
        "hit_rate": _hit_rates(outcome),
        "read_bytes_per_token": {
            n: [r and r.read_bytes / tokens[Phase.DECODE] for r in row] for n, row in outcome.replays.items()
        },
        "layers": {
            n: [r and {i: stats.hit_rate for i, stats in r.layers.items()} for r in row]
            for n, row in outcome.replays.items()
        },
        "recall_budgets": outcome.recall_budgets,
        "recall": dict(outcome.recall),
    }


def _show(outcome: _Outcome, path: Path) -> None:
    trace, tokens = outcome.trace, outcome.trace.tokens
    console = Console()
    console.print(
        f"{path.name}: {trace.model}, {len(trace.layers)} layers, top {trace.top_k}, {tokens[Phase.PREFILL]} tokens "
        f"of prompt and {tokens[Phase.DECODE]} decoded, {format_bytes(trace.expert_bytes)} of experts",
        highlight=False,
        soft_wrap=True,
    )
    title = "hit rate in decode, %"
    table = Table(
        "residency", "budget", title=title, title_justify="left", box=box.SIMPLE, collapse_padding=True
    )
    for name in outcome.replays:
        table.add_column(name, justify="right")
    for i, (share, budget) in enumerate(zip(outcome.residency, outcome.budgets, strict=True)):
        row = [replays[i] for replays in outcome.replays.values()]
        rates = ("-" if r is None else f"{100 * r.hit_rate:.1f}" for r in row)
        table.add_row(f"{share:.1%}", format_bytes(budget), *rates)
    console.print(table)
    if any(r is None for row in outcome.replays.values() for r in row):
        console.print("-: too small a budget: below the fewest slots that work")
    if outcome.recall:
        title = "recall of predictors, %"
        table = Table(
            "experts named per layer",
            title=title,
            title_justify="left",
            box=box.SIMPLE,
            collapse_padding=True,
        )
        for budget in outcome.recall_budgets:
            table.add_column(str(budget), justify="right")
        for name, values in outcome.recall.items():
            table.add_row(name, *(f"{100 * value:.1f}" for value in values))
        console.print(table)
