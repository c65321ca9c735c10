"""Routing traces from and to the text that other tools share."""

from pathlib import Path
from typing import Annotated

import typer

from leanmoe.errors import UsageError
from leanmoe.experts.trace import MAGIC, RoutingTrace
from leanmoe.experts.trace_csv import export_csv, import_csv


def read_trace(path: Path) -> RoutingTrace:
    """A trace in lean's own form or as `route_trace v1` text, told apart by how the file starts.

    Raises `FormatError`, `UnsupportedError`, and `UsageError` for a file that cannot be read.
    """
    try:
        with path.open("rb") as file:
            own = file.read(len(MAGIC)) == MAGIC
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; a routing trace was wanted, as lean trace records") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    return RoutingTrace.load(path) if own else import_csv(path)


def import_trace(
    source: Annotated[Path, typer.Argument(metavar="CSV", help="A `route_trace v1` file.")],
    out: Annotated[Path, typer.Argument(metavar="TRACE", help="The trace to write.")],
) -> None:
    """Turn a `route_trace v1` CSV file into a routing trace."""
    import_csv(source).save(out)
    print(out)


def export_trace(
    source: Annotated[Path, typer.Argument(metavar="TRACE", help="A routing trace.")],
    out: Annotated[Path, typer.Argument(metavar="CSV", help="The `route_trace v1` file to write.")],
) -> None:
    """Turn a routing trace into a `route_trace v1` CSV file."""
    export_csv(RoutingTrace.load(source), out)
    print(out)
