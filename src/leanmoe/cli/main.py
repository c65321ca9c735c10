"""The `lean` command: arguments in, tables and text out. How anything is done is not known here."""

import logging
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from leanmoe import __version__
from leanmoe.cli.bench import bench
from leanmoe.cli.chat import chat
from leanmoe.cli.heat_map import heat_map
from leanmoe.cli.pack_commands import export, info, pack, verify
from leanmoe.cli.plan import plan
from leanmoe.cli.pull import pull
from leanmoe.cli.routing import profile, trace
from leanmoe.cli.run import run
from leanmoe.cli.simulate import simulate
from leanmoe.cli.trace_commands import export_trace, import_trace
from leanmoe.cli.tune import tune
from leanmoe.errors import LeanError, UsageError


class _Commands(TyperGroup):
    """Ends a command that Ctrl-C interrupts as a shell expects; Typer's own group says "Aborted" instead."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            print(f"lean: {str(interrupt) or 'interrupted'}", file=sys.stderr)
            sys.exit(130)


app = typer.Typer(
    cls=_Commands,
    help="Run Mixture-of-Experts models that are larger than memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"lean {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks and details on stderr."),
) -> None:
    """Run Mixture-of-Experts models that are larger than memory."""
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING, format="lean: %(message)s", stream=sys.stderr
    )


for command in (
    pull,
    pack,
    export,
    info,
    verify,
    plan,
    run,
    chat,
    profile,
    trace,
    tune,
    bench,
    simulate,
    import_trace,
    export_trace,
):
    app.command()(command)
app.command("map")(heat_map)


def main() -> None:
    """Runs `lean`. Errors a user can cause end in one message and exit code 1, or 2 for misuse."""
    _prepare_streams()
    try:
        app()
    except LeanError as error:
        if "--debug" in sys.argv:
            raise
        print(f"lean: {_one_line(str(error))}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away; nothing is left to say
        sys.exit(1)
    except (OSError, MemoryError) as error:
        if "--debug" in sys.argv:
            raise
        print(f"lean: {_one_line(_spelt(error))}", file=sys.stderr)
        sys.exit(1)


def _prepare_streams() -> None:
    """A closed standard stream reads as empty and swallows what is written; text that cannot be encoded is `?`."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _spelt(error: OSError | MemoryError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or "out of memory"


def _one_line(text: str) -> str:
    """`text` with its control characters spelt out: names in it come from files that nobody vouches for."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
