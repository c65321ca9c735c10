"""A progress bar on stderr, where that is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from leanmoe.pack import PackProgress


@contextmanager
def progress_bar(verb: str) -> Iterator[Callable[[PackProgress], None]]:
    """A function that shows how far the work called `verb` is. The bar appears when it is first called."""
    columns = (
        TextColumn(verb),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[name]}", markup=False),
    )
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(verb, total=None, name="")

    def show(at: PackProgress) -> None:
        if not bar.live.is_started:
            bar.start()
        bar.update(task, completed=at.done, total=at.total, name=at.name)
        if at.done == at.total:
            bar.stop()

    try:
        yield show
    finally:
        bar.stop()
