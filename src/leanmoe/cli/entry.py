"""The first code of the `lean` command: while everything else is imported, Ctrl-C ends it without a word."""

import signal


def main() -> None:
    """Runs `lean`."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # it is ignored in the background of a script, and stays so
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from leanmoe.cli.main import main as lean

    signal.signal(signal.SIGINT, before)
    lean()
