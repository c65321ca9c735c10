"""Options that several commands share, so that a flag has one name, one meaning and one help text."""

from typing import Annotated

import typer

from leanmoe.engine.config import EngineConfig
from leanmoe.experts.policy import POLICIES
from leanmoe.experts.store import Verify
from leanmoe.experts.throttle import Predictor, Prefetch
from leanmoe.units import parse_bytes

Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", "-m", metavar="SIZE", help="RAM for the whole process, like 4GiB. [default: 90 % of free]"
    ),
]
Cache = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="At most this much for expert slots. [default: all that is left]"),
]
Vram = Annotated[str | None, typer.Option(metavar="SIZE", help="Bytes on each GPU. [default: 90 % of free]")]
Context = Annotated[
    int | None,
    typer.Option("--context", "-c", help="Tokens a sequence may hold. [default: the model's, at most 4096]"),
]
KvType = Annotated[str, typer.Option(help="KV cache numbers: f16 or f32.")]
DeviceNames = Annotated[
    list[str] | None,
    typer.Option("--device", help="cpu or cuda:N; repeat it to split the layers. [default: cpu]"),
]
Chunk = Annotated[
    int | None, typer.Option(help="Prompt tokens computed at once. [default: fitted to the budget]")
]
Threads = Annotated[int | None, typer.Option("--threads", "-t", help="Compute threads. [default: all cores]")]
Readers = Annotated[int, typer.Option(help="Threads that read expert files.")]
VerifyMode = Annotated[Verify, typer.Option("--verify", help="When an expert file's digest is checked.")]
PrefetchMode = Annotated[
    Prefetch,
    typer.Option(
        "--prefetch", help="Read experts before they are asked for: auto where it makes tokens faster."
    ),
]
PredictorName = Annotated[
    Predictor,
    typer.Option(
        "--predictor", help="What prefetch goes by: the next layers' routers, what followed so far, or both."
    ),
]
PolicyName = Annotated[
    str,
    typer.Option("--policy", help=f"Which expert leaves when a slot is needed: auto, {', '.join(POLICIES)}."),
]
Temperature = Annotated[float, typer.Option("--temperature", "--temp", help="0 takes the most likely token.")]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[
    float, typer.Option(help="Keep the most likely tokens that together reach this probability.")
]
MinP = Annotated[float, typer.Option(help="Drop tokens less likely than this share of the likeliest.")]
RepeatPenalty = Annotated[float, typer.Option(help="Divide the logits of recent tokens; 1 is off.")]
Seed = Annotated[int | None, typer.Option("--seed", "-s", help="Same seed, same answer. [default: random]")]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", "-n", help="Most tokens of an answer. [default: to the end of the context]"),
]
System = Annotated[str | None, typer.Option(help="System message.")]


def engine_config(
    memory: str | None,
    cache: str | None,
    vram: str | None,
    devices: list[str] | None,
    context: int | None,
    kv_type: str,
    chunk: int | None,
    threads: int | None = None,
    readers: int = 4,
    verify: Verify = "first",
    policy: str = "auto",
    prefetch: Prefetch = "off",
    predictor: Predictor = "gate",
) -> EngineConfig:
    """The flags as one checked object."""
    return EngineConfig(
        memory=None if memory is None else parse_bytes(memory),
        cache=None if cache is None else parse_bytes(cache),
        vram=None if vram is None else parse_bytes(vram),
        devices=tuple(devices) if devices else ("cpu",),
        context=context,
        kv_type=kv_type,
        chunk=chunk,
        threads=threads,
        readers=readers,
        verify=verify,
        policy=policy,
        prefetch=prefetch,
        predictor=predictor,
    )
