"""`lean run`: one prompt, one answer, streamed."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from leanmoe.cli import options as opt
from leanmoe.engine.config import EngineConfig
from leanmoe.errors import UsageError

_NO_PROMPT = "give the prompt with -p TEXT, with -f FILE, or on standard input"


@opt.engine_flags
@opt.sampling_flags
def run(
    pack: Annotated[Path, typer.Argument(help="A .lmpack directory, made by `lean pack`.")],
    config: EngineConfig,
    sampling: dict[str, Any],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt. [default: standard input, as with -]")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from a file; - is standard input.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")
    ] = False,
    special: Annotated[
        bool, typer.Option("--special", help="With --raw: special tokens may be written in the prompt.")
    ] = False,
    system: opt.System = None,
    no_think: opt.NoThink = False,
    max_tokens: opt.MaxTokens = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's own end.")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Show what it takes while it runs, and a table at the end.")
    ] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Answer one prompt. The prompt is a user's message where the model has a chat template (see --raw)."""
    from leanmoe.cli.generate import show, summary, table
    from leanmoe.engine.llm import LLM

    text = _prompt(prompt, file)
    request: dict[str, Any] = {
        "max_tokens": max_tokens,
        "stop": stop or (),
        "ignore_eos": ignore_eos,
        **sampling,
    }
    with LLM(pack, **asdict(config)) as llm:
        if raw or not llm.has_chat_template:
            if system is not None or no_think:
                flag = "--no-think" if no_think else "--system"
                raise UsageError(f"{flag} needs a chat template; this run has none")
            stream = llm.stream(text, special=special, **request)
        else:
            if special:
                raise UsageError("--special goes with --raw")
            messages = [{"role": "system", "content": system}] if system is not None else []
            messages.append({"role": "user", "content": text})
            template = llm.chat_template().thinking_off() if no_think else {}
            stream = llm.stream_chat(messages, template=template, **request)
        done = show(llm, stream, silent=as_json, live=stats)
        if as_json:
            print(json.dumps(llm.record(done), ensure_ascii=False))
        elif stats:
            Console(stderr=True).print(table(llm, done))
        else:
            print(summary(llm, done), file=sys.stderr)
    if done.finish_reason == "cancelled":
        raise typer.Exit(130)  # as a shell expects of a command that Ctrl-C ended


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise UsageError("both -p and -f were given; a run takes one prompt")
    if prompt is not None and prompt != "-":
        return prompt
    if file == Path("-"):
        file = None
    elif prompt is None and file is None and sys.stdin.isatty():
        raise UsageError(_NO_PROMPT)
    try:
        text = (sys.stdin.buffer.read() if file is None else file.read_bytes()).decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file or 'standard input'}: not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None
    except OSError as error:
        raise UsageError(f"{file or 'standard input'}: cannot be read: {error.strerror}") from error
    if not text and file is None:
        raise UsageError(f"the prompt is empty; {_NO_PROMPT}")
    return text
