"""`lean pack`, `lean info` and `lean verify`."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from leanmoe.models.registry import model_spec
from leanmoe.pack import AGAIN, PackProgress, Summary, default_output, pack_gguf, summarize, verify_pack
from leanmoe.units import format_bytes


def pack(
    source: Annotated[Path, typer.Argument(metavar="GGUF", help="The model; of a split model, any shard.")],
    out: Annotated[
        Path | None, typer.Argument(help="The pack to make. [default: NAME.lmpack beside GGUF]")
    ] = None,
    consume: Annotated[
        bool, typer.Option("--consume", help="Free the GGUF as it is packed, and delete it at the end.")
    ] = False,
) -> None:
    """Make a pack from a GGUF model. Run it again to resume after an interruption."""
    out = out or default_output(source)
    try:
        with _progress_bar("packing") as report:  # a model that cannot run is refused before hours of copying
            pack_gguf(source, out, consume=consume, progress=report, check=model_spec)
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
    with _progress_bar("verifying") as report:
        faults = verify_pack(path, progress=report)
    for fault in faults:
        print(fault)
    if faults:
        print(f"{path}: {len(faults)} {'fault' if len(faults) == 1 else 'faults'}; {AGAIN}")
        raise typer.Exit(1)
    print(f"{path}: no faults")


@contextmanager
def _progress_bar(verb: str) -> Iterator[Callable[[PackProgress], None]]:
    columns = (
        TextColumn(verb),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[name]}", markup=False),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(verb, total=None, name="")
        yield lambda at: bar.update(task, completed=at.done, total=at.total, name=at.name)


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
        "left out": f"{summary.skipped_tensors} tensors (multi-token prediction)",
    }
    if not summary.experts:
        del rows["expert files"], rows["one expert"]
    if not summary.skipped_tensors:
        del rows["left out"]
    for label, value in rows.items():
        table.add_row(label, value)
    for type_name, (count, nbytes) in summary.types.items():
        table.add_row("type", f"{type_name}: {count} tensors, {format_bytes(nbytes)}")
    return table
