"""`lean plan`: where every byte of a budget would go, from headers alone."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from leanmoe.cli.options import (
    Cache,
    Chunk,
    Context,
    DeviceNames,
    KvType,
    Memory,
    Threads,
    Vram,
    engine_config,
)
from leanmoe.engine.memory import default_budget
from leanmoe.engine.plan import MemoryPlan, expected_base, plan_memory
from leanmoe.errors import UsageError
from leanmoe.experts.slots import SlotPlan
from leanmoe.formats.gguf import read_gguf
from leanmoe.models.registry import model_spec
from leanmoe.pack import expert_layouts, open_pack
from leanmoe.units import format_bytes


def plan(
    model: Annotated[
        Path, typer.Argument(metavar="PACK_OR_GGUF", help="A .lmpack directory or a GGUF file.")
    ],
    memory: Memory = None,
    cache: Cache = None,
    vram: Vram = None,
    device: DeviceNames = None,
    context: Context = None,
    kv_type: KvType = "f16",
    chunk: Chunk = None,
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="One machine-readable record.")] = False,
) -> None:
    """Show where every byte of a memory budget goes. Reads headers only."""
    config = engine_config(memory, cache, vram, device, context, kv_type, chunk, threads)
    if config.devices[0] != "cpu" and config.vram is None:
        raise UsageError("say how much the GPU has with --vram: a plan asks no device")
    if model.is_dir():
        pack = open_pack(model)
        gguf, manifest = pack.trunk, pack.manifest
    else:
        gguf = read_gguf(model)
        manifest = expert_layouts(gguf)
    spec = model_spec(gguf)
    made = plan_memory(
        spec,
        gguf,
        manifest,
        config,
        memory=config.memory or default_budget(),
        base=expected_base(spec),
        vram=(config.vram or 0,) * len(config.devices) if config.devices[0] != "cpu" else (),
    )
    if as_json:
        print(json.dumps(_record(made)))
    else:
        _show(made, model)


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
    table.add_row("fixed", format_bytes(made.fixed), "interpreter, libraries, tokenizer")
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
            f"{share}; smallest memory that works: {format_bytes(made.smallest_memory)}", highlight=False
        )
    if made.below_working_set:
        console.print("The slots hold less than one token's experts: most look-ups will read from disk.")
