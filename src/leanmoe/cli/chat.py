"""`lean chat`: a conversation in the terminal."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from leanmoe.cli import options as opt
from leanmoe.engine.config import EngineConfig
from leanmoe.errors import UsageError

_HELP = (
    "/reset forgets the conversation, /map shows the experts, /exit or Ctrl-D leaves, Ctrl-C stops an answer."
)


@opt.engine_flags
@opt.sampling_flags
def chat(
    pack: Annotated[Path, typer.Argument(help="A .lmpack directory, made by `lean pack`.")],
    config: EngineConfig,
    sampling: dict[str, Any],
    system: opt.System = None,
    no_think: opt.NoThink = False,
    max_tokens: opt.MaxTokens = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Show what each answer takes while it is made.")
    ] = False,
) -> None:
    """Talk with the model. What both sides said keeps its KV state, so each turn computes only what is new."""
    from leanmoe.cli.generate import show, summary
    from leanmoe.cli.heat_map import print_map
    from leanmoe.engine.llm import LLM

    opening = [{"role": "system", "content": system}] if system is not None else []
    with LLM(pack, **asdict(config)) as llm:
        if not llm.has_chat_template:
            raise UsageError(f"{pack}: the model has no chat template; use lean run --raw")
        template = llm.chat_template().thinking_off() if no_think else {}
        print(f"{pack.name}: {_HELP}", file=sys.stderr)
        messages = list(opening)
        while (line := _ask()) is not None:
            if line == "/reset":
                messages = list(opening)
            elif line == "/map":
                print_map(llm.heat(), set(llm.resident()), file=sys.stderr)
            elif line.startswith("/"):
                print(_HELP, file=sys.stderr)
            else:
                messages.append({"role": "user", "content": line})
                try:
                    stream = llm.stream_chat(messages, max_tokens=max_tokens, template=template, **sampling)
                    done = show(llm, stream, live=stats)
                except UsageError as error:
                    messages.pop()  # as when the conversation has outgrown the context
                    print(f"lean: {error}; /reset starts afresh", file=sys.stderr)
                    continue
                if done.tokens:
                    messages.append({"role": "assistant", "content": done.text})
                    print(summary(llm, done), file=sys.stderr)
                else:
                    messages.pop()
                    print("stopped before the answer began; what you said is left out", file=sys.stderr)


def _ask() -> str | None:
    """The next line the user types that is not empty; None at the end."""
    import readline  # noqa: F401  line editing and history for input()

    while True:
        try:
            prompt = "> " if sys.stdin.isatty() else ""
            if not sys.stdout.isatty():  # only answers belong in a file or a pipe
                print(prompt, end="", file=sys.stderr, flush=True)
                prompt = ""
            line = input(prompt).strip()
        except EOFError:
            if sys.stdin.isatty():  # Ctrl-D leaves the cursor behind the prompt
                print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if line in ("/exit", "/quit"):
            return None
        if line:
            return line
