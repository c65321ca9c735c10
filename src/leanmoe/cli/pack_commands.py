"""`lean pack`, `lean info`, `lean verify` and `lean export`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from leanmoe.cli.check import check_model
from leanmoe.cli.progress import progress_bar
from leanmoe.convert import QUANTS, CheckpointSource
from leanmoe.errors import UsageError
from leanmoe.pack import (
    AGAIN,
    Summary,
    default_output,
    export_gguf,
    is_pack,
    pack_gguf,
    pack_source,
    summarize,
    verify_pack,
)
from leanmoe.units import format_bytes


def pack(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="GGUF_OR_FOLDER",
            help="A GGUF model (of a split one, any shard), or a folder with a safetensors checkpoint.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Argument(help="The pack to make. [default: NAME.lmpack beside the model]")
    ] = None,
    quant: Annotated[
        str | None,
        typer.Option(
            help=f"Quantise a checkpoint: {', '.join(QUANTS)}. [default: the types that it is stored in]"
        ),
    ] = None,
    consume: Annotated[
        bool, typer.Option("--consume", help="Free the GGUF as it is packed, and delete it at the end.")
    ] = False,
) -> None:
    """Make a pack from a GGUF model or a safetensors checkpoint. Run it again to resume after an interruption."""
    if source.is_dir() and is_pack(source):
        raise UsageError(f"{source}: is a pack already; a GGUF file or a safetensors checkpoint was wanted")
    if source.is_file() and source.name.endswith((".safetensors", ".json")):
        raise UsageError(
            f"{source}: is one file of a checkpoint; give the folder: lean pack {source.parent} --quant q4_k_m"
        )
    if quant is not None and not source.is_dir():
        raise UsageError(f"{source}: --quant is for safetensors checkpoints; a GGUF is packed as it is")
    try:
        with progress_bar("packing") as report:  # a model that cannot run is refused before hours of copying
            if source.is_dir():
                out = out or source.resolve().with_name(source.resolve().name + ".lmpack")
                checkpoint = CheckpointSource(source, quant)
                check_model(checkpoint.gguf)
                pack_source(checkpoint, out, consume=consume, progress=report)
            else:
                out = out or default_output(source)
                pack_gguf(source, out, consume=consume, progress=report, check=check_model)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; run the same command again to go on") from None
    print(out)


def info(
    path: Annotated[Path, typer.Argument(metavar="PACK_OR_GGUF", help="A pack or a GGUF file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a pack or a GGUF file holds. Reads headers only."""
    summary = summarize(path)
    if as_json:
        print(json.dumps(asdict(summary)))
    else:
        Console(highlight=False, markup=False).print(_table(summary))


def verify(path: Annotated[Path, typer.Argument(metavar="PACK", help="The pack to check.")]) -> None:
    """Compare every file of a pack with its digest. Lists all faults, and exits with 1 if there are any."""
    with progress_bar("verifying") as report:
        faults = verify_pack(path, progress=report)
    for fault in faults:
        print(fault)
    if faults:
        print(f"{path}: {_counted(len(faults), 'fault')}; {AGAIN}")
        raise typer.Exit(1)
    print(f"{path}: no faults")


def export(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="The pack.")],
    out: Annotated[Path, typer.Argument(metavar="GGUF", help="The file to write.")],
) -> None:
    """Write a pack as one GGUF file, with the same tensors byte for byte."""
    with progress_bar("exporting") as report:
        export_gguf(pack, out, progress=report)
    print(out)


def _table(summary: Summary) -> Table:
    sizes = dict.fromkeys(map(format_bytes, (summary.expert_bytes_min, summary.expert_bytes_max)))
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "file": f"{summary.path} ({'pack' if summary.packed else 'GGUF; sizes are those of its pack'})",
        "name": summary.name or "-",
        "architecture": summary.architecture,
        "parameters": f"{summary.parameters / 1e6:,.1f} million",
        "layers": f"{summary.layers}, {summary.expert_layers} with experts",
        "experts": f"{summary.experts} a layer, top-{summary.top_k}" if summary.experts else "none (dense)",
        "expert files": f"{summary.expert_files}, {format_bytes(summary.expert_bytes)}",
        "one expert": " to ".join(sizes),
        "trunk": format_bytes(summary.trunk_bytes),
        "context length": str(summary.context_length or "-"),
        "chat template": "yes" if summary.chat_template else "no",
        "left out": f"{_counted(summary.skipped_tensors, 'tensor')} (multi-token prediction)",
    }
    if not summary.experts:
        del rows["expert files"], rows["one expert"]
    if not summary.skipped_tensors:
        del rows["left out"]
    for label, value in rows.items():
        table.add_row(label, value)
    for type_name, (count, nbytes) in summary.types.items():
        table.add_row("type", f"{type_name}: {_counted(count, 'tensor')}, {format_bytes(nbytes)}")
    return table


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
