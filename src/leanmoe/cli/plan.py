"""`lean plan`: where every byte of a budget would go, from headers alone."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from leanmoe.cli import options as opt
from leanmoe.engine.config import Choice, EngineConfig
from leanmoe.engine.estimate import Estimate, estimate, pack_trace
from leanmoe.engine.plan import MemoryPlan, foresee_memory
from leanmoe.engine.tuning import choice_for, find_tuned
from leanmoe.experts.slots import SlotPlan
from leanmoe.formats.gguf import GGUFFile, read_gguf
from leanmoe.models.registry import model_spec
from leanmoe.models.spec import ModelSpec
from leanmoe.pack import expert_layouts, names_pack, open_pack
from leanmoe.units import format_bytes


@opt.memory_flags
def plan(
    model: Annotated[
        Path, typer.Argument(metavar="PACK_OR_GGUF", help="A .lmpack directory or a GGUF file.")
    ],
    config: EngineConfig,
    as_json: opt.AsJson = False,
) -> None:
    """Show where every byte of a memory budget goes, and how fast that will be. Reads headers only."""
    if names_pack(model):
        pack = open_pack(model)
        gguf, manifest = pack.trunk, pack.manifest
    else:
        gguf = read_gguf(model)
        manifest = expert_layouts(gguf)
    spec = model_spec(gguf)
    made = foresee_memory(spec, gguf, manifest, config)
    speed = _estimate(model, spec, gguf, made)
    if as_json:
        print(json.dumps(_record(made) | {"estimate": None if speed is None else _speed_record(speed)}))
    else:
        _show(made, model)
        if speed is not None:
            _show_speed(speed)


def _estimate(model: Path, spec: ModelSpec, gguf: GGUFFile, made: MemoryPlan) -> Estimate | None:
    """What a token will take; None for a model without experts, and for a GPU that was never measured."""
    slots = [d.slots for d in made.devices if d.slots is not None]
    tuned = find_tuned(model) if model.is_dir() else []
    if not slots or spec.router is None or (made.devices[0].device != "cpu" and not tuned):
        return None
    embedding = gguf.tensors["token_embd.weight"].nbytes if "output.weight" in gguf.tensors else 0
    picked = sum(c.working_set * c.size for plan in slots for c in plan.classes)
    choice = choice_for(tuned, made.memory) or Choice()
    return estimate(
        slots,
        spec.router.top_k,
        touched=made.trunk_bytes - embedding + picked,
        trace=pack_trace(model) if model.is_dir() else None,
        measured=tuned[-1].measured if tuned else None,
        policy=choice.policy,
        readers=choice.readers,
    )


def _speed_record(speed: Estimate) -> dict[str, Any]:
    return asdict(speed) | {"tokens_per_second": speed.tokens_per_second}


def _show_speed(speed: Estimate) -> None:
    console = Console(highlight=False)
    console.print(
        f"expected: hit rate {speed.hit_rate:.0%}, {format_bytes(round(speed.read_bytes))} read a token, "
        f"{speed.tokens_per_second:.2g} tokens/s ({1000 * speed.compute_seconds:.0f} ms computing, "
        f"{1000 * speed.read_seconds:.0f} ms waiting for reads)",
        soft_wrap=True,
    )
    for assumption in speed.assumes:
        console.print(f"  assuming {assumption}", soft_wrap=True)


def _record(made: MemoryPlan) -> dict[str, Any]:
    return {
        "memory": made.memory,
        "fixed": made.fixed,
        "context": made.context,
        "chunk": made.chunk,
        "expert_bytes": made.experts,
        "slot_bytes": made.slot_bytes,
        "residency": made.residency,
        "below_working_set": made.below_working_set,
        "floor": made.smallest_memory,
        "devices": [
            {
                "device": d.device,
                "layers": [d.layers.start, d.layers.stop],
                "budget": d.budget,
                "trunk": d.trunk,
                "state": d.state,
                "scratch": d.scratch,
                "slots": d.slots.slot_bytes if d.slots else 0,
            }
            for d in made.devices
        ],
    }


def _slots(slots: SlotPlan) -> str:
    return ", ".join(f"{c.slots} of {c.experts} experts of {format_bytes(c.size)}" for c in slots.classes)


def _show(made: MemoryPlan, model: Path) -> None:
    table = Table(
        "what", "bytes", "", title=f"{model.name} in {format_bytes(made.memory)}", title_justify="left"
    )
    table.columns[1].justify = "right"
    table.add_row("fixed", format_bytes(made.fixed), "interpreter, libraries, tokenizer (estimated)")
    for d in made.devices:
        where = f"{d.device}, layers {d.layers.start} to {d.layers.stop - 1}"
        table.add_row("trunk", format_bytes(d.trunk), where)
        table.add_row("KV state", format_bytes(d.state), f"{made.context} tokens")
        table.add_row("scratch", format_bytes(d.scratch), f"prompt in chunks of {made.chunk}")
        if d.slots:
            table.add_row("expert slots", format_bytes(d.slots.slot_bytes), _slots(d.slots))
    console = Console()
    console.print(table)
    if made.experts:
        share = f"{made.residency:.1%} of {format_bytes(made.experts)} of experts resident"
        console.print(
            f"{share}; smallest memory that works: {made.smallest_memory >> 20}MiB", highlight=False
        )
    if made.below_working_set:
        console.print("The slots hold less than one token's experts: most look-ups will read from disk.")
