"""The engine's configuration: one typed object, made at the edge (`cli`, `LLM`)."""

from dataclasses import dataclass, replace

from leanmoe.errors import UsageError
from leanmoe.experts.policy import policy_named
from leanmoe.experts.throttle import DEFAULT_LEVEL, Predictor, Prefetch
from leanmoe.pack.digests import Verify
from leanmoe.units import format_bytes

PREFETCH_MODES: tuple[Prefetch, ...] = ("off", "auto", "on")
PREDICTORS: tuple[Predictor, ...] = ("gate", "transitions", "both")
DEFAULT_WARM_SECONDS = 10.0
DEFAULT_POLICY = "auto"
DEFAULT_PREFETCH: Prefetch = "auto"
DEFAULT_READERS = 4
MAX_PREFETCH_LEVEL = 16
VERIFY_MODES: tuple[Verify, ...] = ("first", "always", "never")
RECORDING_BYTES = 8 << 20
"""The most that one process remembers of its routing: of a model of 48 layers and top 8, some 2,800 tokens."""

KV_ELEMENT_BYTES = {"f16": 2, "f32": 4}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything a user may set about how a model is held and run.

    `memory`: bytes of RAM for the whole process; None takes nine tenths of what is free. `cache`: at most these
    bytes for expert slots, over all devices. `devices`: where layers and their experts live, in order: "cpu",
    "cuda:0", ... (naming one twice splits the layers between two caches on it). `vram`: bytes on each GPU; None
    takes nine tenths of what is free there. `context`: tokens a sequence may hold; None takes the model's own,
    at most 4096. `chunk`: prompt tokens computed at once; None fits it to the budget. `verify`: when an expert
    file's digest is checked. `policy`: which expert leaves when a slot is needed, a name of
    `experts.policy.POLICIES` or "auto". `prefetch`: whether experts are read before they are asked for, as the
    `predictor` expects (see `ExpertPool.open`); `prefetch_level`: how much, where it is "on"
    (`experts/throttle.py`). `warm`: seconds for which the experts that were used most are read in the background at
    the start, if the pack has a profile; 0 does without. `learn`: whether the routing is added to the pack's profile
    at the end. `recording`: bytes that the record of the routing may take, part of the budget; None takes
    `RECORDING_BYTES` to learn and else keeps none. `record_probabilities`: with the routers' full output.

    `policy`, `prefetch`, `prefetch_level` and `readers` may be None: then `settled` takes what `lean tune` chose.
    """

    memory: int | None = None
    cache: int | None = None
    vram: int | None = None
    devices: tuple[str, ...] = ("cpu",)
    context: int | None = None
    kv_type: str = "f16"
    chunk: int | None = None
    threads: int | None = None
    readers: int | None = None
    verify: Verify = "first"
    policy: str | None = None
    prefetch: Prefetch | None = None
    prefetch_level: int | None = None
    predictor: Predictor = "gate"
    warm: float = DEFAULT_WARM_SECONDS
    learn: bool = False
    recording: int | None = None
    record_probabilities: bool = False

    def __post_init__(self) -> None:
        if self.kv_type not in KV_ELEMENT_BYTES:
            raise UsageError(
                f"KV type '{self.kv_type}' is unknown; wanted one of {', '.join(KV_ELEMENT_BYTES)}"
            )
        if self.verify not in VERIFY_MODES:
            raise UsageError(
                f"verify mode '{self.verify}' is unknown; wanted one of {', '.join(VERIFY_MODES)}"
            )
        if self.prefetch is not None and self.prefetch not in PREFETCH_MODES:
            raise UsageError(
                f"prefetch mode '{self.prefetch}' is unknown; wanted one of {', '.join(PREFETCH_MODES)}"
            )
        if self.predictor not in PREDICTORS:
            raise UsageError(
                f"predictor '{self.predictor}' is unknown; wanted one of {', '.join(PREDICTORS)}"
            )
        if self.policy is not None:
            policy_named(self.policy)
        if not 0 <= self.warm <= 86400:
            raise UsageError(f"warm is {self.warm} seconds; wanted 0 to 86400")
        if self.prefetch_level is not None and self.prefetch != "on":
            raise UsageError(
                f"a prefetch level goes with prefetch 'on'; it is '{self.prefetch or DEFAULT_PREFETCH}'"
            )
        if self.prefetch == "on" and self.readers == 1:
            raise UsageError("prefetch 'on' needs 2 readers or more: one is kept for demand reads")
        for name, low, high in (
            ("context", 1, 2**24),
            ("chunk", 1, 2**16),
            ("threads", 1, 1024),
            ("readers", 1, 64),
            ("prefetch_level", 1, MAX_PREFETCH_LEVEL),
            ("recording", 0, 2**40),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or not low <= value <= high):
                raise UsageError(f"{name} is {value!r}; wanted {low} to {high}")
        if not self.devices:
            raise UsageError("no device given; wanted cpu or cuda:N")
        for device in self.devices:
            kind, _, index = str(device).partition(":")
            if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
                raise UsageError(f"device '{device}' is unknown; wanted cpu, cuda or cuda:N")
        if len({d.partition(":")[0] for d in self.devices}) > 1:
            raise UsageError("layers cannot be split between cpu and cuda yet; name devices of one kind")
        if self.cache and self.memory and self.cache > self.memory and self.devices[0] == "cpu":
            raise UsageError(
                f"a cache of {format_bytes(self.cache)} does not fit a memory budget of {format_bytes(self.memory)}; "
                "the slots are part of the budget"
            )
        if self.vram is not None and self.devices[0].startswith("cpu"):
            raise UsageError("a VRAM budget needs a CUDA device; on the CPU set the memory budget")

    @property
    def recording_bytes(self) -> int:
        """The most that the record of the routing may take."""
        if self.recording is None:
            return RECORDING_BYTES if self.learn else 0
        return self.recording

    def settled(self, chosen: "Choice | None") -> "EngineConfig":
        """With a value for everything that was left open: the `chosen` one, or else the default."""
        best = chosen or Choice()
        readers = self.readers or best.readers
        prefetch, level = self.prefetch, self.prefetch_level
        if prefetch is None:
            prefetch, level = best.prefetch, best.prefetch_level
            if readers == 1:  # which was asked for; it is kept for demand
                prefetch, level = "off", None
        return replace(
            self,
            policy=self.policy or best.policy,
            prefetch=prefetch,
            prefetch_level=(level or DEFAULT_LEVEL) if prefetch == "on" else None,
            readers=readers,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """What `lean tune` may choose; without it, the defaults. `prefetch_level` is None unless prefetch is "on"."""

    policy: str = DEFAULT_POLICY
    prefetch: Prefetch = DEFAULT_PREFETCH
    prefetch_level: int | None = None
    readers: int = DEFAULT_READERS
