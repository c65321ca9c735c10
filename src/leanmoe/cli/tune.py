"""`lean tune`: measure a pack on this machine, choose how to run it, and say why."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from leanmoe.cli import options as opt
from leanmoe.engine.config import EngineConfig
from leanmoe.units import format_bytes

if TYPE_CHECKING:
    from leanmoe.engine.tune import Findings


_RECALL = "picks foreseen, naming top-k / twice as many experts of a layer"


@opt.memory_flags
def tune(
    pack: Annotated[Path, typer.Argument(help="A .lmpack directory, made by `lean pack`.")],
    config: EngineConfig,
    tokens: Annotated[
        int,
        typer.Option(
            "--tokens", "-n", help="Tokens decoded to record routing, and at each prefetch level.", min=64
        ),
    ] = 192,
    as_json: opt.AsJson = False,
) -> None:
    """Choose reader threads, policy and prefetch for a pack on this machine, by measuring; `lean run` uses them."""
    from leanmoe.engine.tune import tune as measure

    console = Console(stderr=True)
    with console.status("") as status:
        found = measure(pack, config, tokens=tokens, report=lambda step: status.update(step))
    if as_json:
        print(json.dumps(_record(found)))
    else:
        _show(found, pack)


def _record(found: "Findings") -> dict[str, Any]:
    return {
        **asdict(found.tuned),
        "residency": found.residency,
        "hit_rates": found.hit_rates,
        "recall": found.recall,
        "prefetch_levels": {
            n: {"log_ratio": mean, "error": error} for n, (mean, error) in found.levels.items()
        },
        "seconds_per_token": found.seconds,
        "stall_seconds_per_token": found.stall_seconds,
    }


def _show(found: "Findings", pack: Path) -> None:
    console = Console(highlight=False)
    choice, measured = found.tuned.choice, found.tuned.measured
    console.print(f"{pack.name} on {found.tuned.host}, in {format_bytes(found.tuned.memory)}", soft_wrap=True)
    console.print(
        f"{found.residency:.1%} of the experts resident; a token took {1000 * found.seconds:.0f} ms, "
        f"of which {1000 * found.stall_seconds:.0f} ms waiting for reads",
        soft_wrap=True,
    )
    table = Table("reader threads", "reads a second", box=box.SIMPLE)
    for threads, rate in measured.read_rates.items():
        table.add_row(str(threads), f"{format_bytes(int(rate))}{'  <-' if threads == choice.readers else ''}")
    console.print(table)
    table = Table("policy", "hit rate, replayed", box=box.SIMPLE)
    for name, rate in found.hit_rates.items():
        table.add_row(name, f"{rate:.1%}{'  <-' if name == choice.policy else ''}")
    console.print(table)
    table = Table(
        "layers ahead", "routers", "transitions", title=_RECALL, title_justify="left", box=box.SIMPLE
    )
    for distance in sorted(set().union(*found.recall.values())):
        cells = (found.recall[name].get(distance) for name in ("routers", "transitions"))
        table.add_row(
            str(distance), *("-" if c is None else " / ".join(f"{x:.0%}" for x in c) for c in cells)
        )
    console.print(table)
    if found.levels:
        table = Table("prefetch level", "time of a token", "doubt", box=box.SIMPLE)
        for level, (mean, error) in found.levels.items():
            chosen = "  <-" if level == (choice.prefetch_level or 0) else ""
            table.add_row(str(level), f"{math.exp(mean) - 1:+.1%}{chosen}", f"{error:.1%}")
        console.print(table)
    else:
        console.print("prefetch: nothing to gain, every expert has a slot")
    console.print(
        f"chosen: {_flags(found)}; `lean run` and `lean chat` use it unless told otherwise", soft_wrap=True
    )


def _flags(found: "Findings") -> str:
    choice = found.tuned.choice
    level = f" --prefetch-level {choice.prefetch_level}" if choice.prefetch_level else ""
    return f"--readers {choice.readers} --policy {choice.policy} --prefetch {choice.prefetch}{level}"
