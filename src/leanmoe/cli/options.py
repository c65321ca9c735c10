"""Options that several commands share, so that a flag has one name, one meaning and one help text."""

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from leanmoe.engine.config import DEFAULT_WARM_SECONDS, EngineConfig
from leanmoe.experts.policy import POLICIES
from leanmoe.experts.throttle import Predictor, Prefetch
from leanmoe.pack.digests import Verify
from leanmoe.units import parse_bytes

AsJson = Annotated[bool, typer.Option("--json", help="Print one machine-readable record instead.")]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", "-m", metavar="SIZE", help="RAM for the whole process, like 4GiB. [default: 90 % of free]"
    ),
]
Memories = Annotated[
    str | None,
    typer.Option(
        "--memory",
        "-m",
        metavar="SIZES",
        help="RAM for the whole process: sizes, comma-separated; none is 90 % of free. [default: none]",
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
Readers = Annotated[
    int | None, typer.Option(help="Threads that read expert files. [default: as tuned, else 4]")
]
VerifyMode = Annotated[Verify, typer.Option("--verify", help="When an expert file's digest is checked.")]
PrefetchMode = Annotated[
    Prefetch | None,
    typer.Option(
        "--prefetch",
        help="Read experts ahead: auto where it makes tokens faster. [default: as tuned, else auto]",
    ),
]
PrefetchLevel = Annotated[
    int | None,
    typer.Option(
        help="With --prefetch on: 1 reads one expert while the disk is idle, n reads n - 1 at any time. [default: 3]"
    ),
]
PredictorName = Annotated[
    Predictor,
    typer.Option(
        "--predictor", help="What prefetch goes by: the next layers' routers, what followed so far, or both."
    ),
]
PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help=f"Which expert leaves when a slot is needed: auto, {', '.join(POLICIES)}. [default: as tuned, else auto]",
    ),
]
Warm = Annotated[
    float,
    typer.Option(help="Seconds for which the profile's hottest experts are read at the start; 0 is off."),
]
Learn = Annotated[
    bool,
    typer.Option("--learn/--no-learn", help="Add the routing to the pack's profile at the end."),
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
NoThink = Annotated[
    bool, typer.Option("--no-think", help="Answer without thinking first, where the chat template allows it.")
]
System = Annotated[str | None, typer.Option(help="System message.")]

Command = Callable[..., None]


def _memory(
    memory: Memory = None,
    cache: Cache = None,
    vram: Vram = None,
    device: DeviceNames = None,
    context: Context = None,
    kv_type: KvType = "f16",
    chunk: Chunk = None,
    threads: Threads = None,
) -> dict[str, Any]:
    return {
        "memory": None if memory is None else parse_bytes(memory),
        "cache": None if cache is None else parse_bytes(cache),
        "vram": None if vram is None else parse_bytes(vram),
        "devices": tuple(device) if device else ("cpu",),
        "context": context,
        "kv_type": kv_type,
        "chunk": chunk,
        "threads": threads,
    }


def _experts(
    readers: Readers = None,
    verify: VerifyMode = "first",
    policy: PolicyName = None,
    prefetch: PrefetchMode = None,
    prefetch_level: PrefetchLevel = None,
    predictor: PredictorName = "gate",
    warm: Warm = DEFAULT_WARM_SECONDS,
    learn: Learn = True,
) -> dict[str, Any]:
    return dict(locals())


def _sampling(
    temperature: Temperature = 0.8,
    top_k: TopK = 40,
    top_p: TopP = 0.95,
    min_p: MinP = 0.05,
    repeat_penalty: RepeatPenalty = 1.0,
    seed: Seed = None,
) -> dict[str, Any]:
    return dict(locals())


def _flags(
    parameter: str, make: Callable[..., Any], *groups: Callable[..., dict[str, Any]]
) -> Callable[[Command], Command]:
    """A decorator: a command gets the flags of `groups` in place of its `parameter`, which `make` makes of them."""
    flags = [flag for group in groups for flag in inspect.signature(group).parameters.values()]

    def decorate(command: Command) -> Command:
        def with_flags(**given: Any) -> None:
            values: dict[str, Any] = {}
            for group in groups:
                values |= group(**{name: given.pop(name) for name in inspect.signature(group).parameters})
            command(**given, **{parameter: make(**values)})

        own = [flag for flag in inspect.signature(command).parameters.values() if flag.name != parameter]
        merged = [flag.replace(kind=flag.KEYWORD_ONLY) for flag in (*own, *flags)]
        with_flags.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {flag.name: flag.annotation for flag in merged}
        with_flags.__name__, with_flags.__doc__ = command.__name__, command.__doc__
        return with_flags

    return decorate


def _speed_test(**given: Any) -> dict[str, Any]:
    limits = (given.pop("memory") or "none").split(",")
    sizes = [None if limit.strip() == "none" else parse_bytes(limit) for limit in limits]
    return {"memory": sizes, **{key: value for key, value in _memory(**given).items() if key != "memory"}}


def _without(group: Callable[..., Any], *names: str) -> list[inspect.Parameter]:
    return [flag for flag in inspect.signature(group).parameters.values() if flag.name not in names]


_speed_test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter("memory", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Memories),
        *(flag.replace(kind=inspect.Parameter.KEYWORD_ONLY) for flag in _without(_memory, "memory")),
    ]
)


def _reading(**given: Any) -> dict[str, Any]:
    return given


_reading.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [flag.replace(kind=inspect.Parameter.KEYWORD_ONLY) for flag in _without(_experts, "warm", "learn")]
)


def _each_memory(memory: Sequence[int | None], **others: Any) -> list[EngineConfig]:
    return [EngineConfig(memory=size, **others) for size in memory]


bench_flags = _flags("configs", _each_memory, _speed_test, _reading)
"""Gives a command the engine's flags but for those of the profile, and several budgets, as its `configs`."""
memory_flags = _flags("config", EngineConfig, _memory)
"""Gives a command the flags that say which memory and devices there are, as its `config`."""
engine_flags = _flags("config", EngineConfig, _memory, _experts)
"""Gives a command all flags of the engine, as its `config`."""
sampling_flags = _flags("sampling", dict, _sampling)
"""Gives a command the flags of sampling, as its `sampling`."""
