"""`lean chat`: a conversation in the terminal."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from leanmoe.cli import options as opt
from leanmoe.errors import UsageError

_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def chat(
    pack: Annotated[Path, typer.Argument(help="A .lmpack directory, made by `lean pack`.")],
    system: opt.System = None,
    max_tokens: opt.MaxTokens = None,
    temperature: opt.Temperature = 0.8,
    top_k: opt.TopK = 40,
    top_p: opt.TopP = 0.95,
    min_p: opt.MinP = 0.05,
    repeat_penalty: opt.RepeatPenalty = 1.0,
    seed: opt.Seed = None,
    memory: opt.Memory = None,
    cache: opt.Cache = None,
    vram: opt.Vram = None,
    device: opt.DeviceNames = None,
    context: opt.Context = None,
    kv_type: opt.KvType = "f16",
    chunk: opt.Chunk = None,
    threads: opt.Threads = None,
    readers: opt.Readers = 4,
    verify: opt.VerifyMode = "first",
    policy: opt.PolicyName = "auto",
    prefetch: opt.PrefetchMode = "off",
    predictor: opt.PredictorName = "gate",
) -> None:
    """Talk with the model. What both sides said keeps its KV state, so each turn computes only what is new."""
    from leanmoe.cli.generate import show, summary
    from leanmoe.engine.llm import LLM

    config = opt.engine_config(
        memory,
        cache,
        vram,
        device,
        context,
        kv_type,
        chunk,
        threads,
        readers,
        verify,
        policy,
        prefetch,
        predictor,
    )
    opening = [{"role": "system", "content": system}] if system is not None else []
    with LLM(pack, **asdict(config)) as llm:
        if not llm.has_chat_template:
            raise UsageError(f"{pack}: the model has no chat template; use lean run --raw")
        print(f"{pack.name}: {_HELP}", file=sys.stderr)
        messages = list(opening)
        while (line := _ask()) is not None:
            if line == "/reset":
                messages = list(opening)
            elif line.startswith("/"):
                print(_HELP, file=sys.stderr)
            else:
                messages.append({"role": "user", "content": line})
                try:
                    done = show(
                        llm.stream_chat(
                            messages,
                            max_tokens=max_tokens,
                            temperature=temperature,
                            top_k=top_k,
                            top_p=top_p,
                            min_p=min_p,
                            repeat_penalty=repeat_penalty,
                            seed=seed,
                        )
                    )
                except UsageError as error:
                    messages.pop()  # as when the conversation has outgrown the context
                    print(f"lean: {error}; /reset starts afresh", file=sys.stderr)
                    continue
                messages.append({"role": "assistant", "content": done.text})
                print(summary(llm, done), file=sys.stderr)


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
            return None
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if line in ("/exit", "/quit"):
            return None
        if line:
            return line
