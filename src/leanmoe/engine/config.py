"""The engine's configuration: one typed object, made at the edge (`cli`, `LLM`)."""

from dataclasses import dataclass

from leanmoe.errors import UsageError
from leanmoe.experts.policy import policy_named
from leanmoe.experts.store import Verify
from leanmoe.experts.throttle import Predictor, Prefetch

PREFETCH_MODES: tuple[Prefetch, ...] = ("off", "auto", "on")
PREDICTORS: tuple[Predictor, ...] = ("gate", "transitions", "both")
DEFAULT_WARM_SECONDS = 10.0
VERIFY_MODES: tuple[Verify, ...] = ("first", "always", "never")

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
    `predictor` expects (see `ExpertPool.open`).
    `warm`: seconds for which the experts that were used most are read in the background at the start, if the
    pack has a profile; 0 does without.
    """

    memory: int | None = None
    cache: int | None = None
    vram: int | None = None
    devices: tuple[str, ...] = ("cpu",)
    context: int | None = None
    kv_type: str = "f16"
    chunk: int | None = None
    threads: int | None = None
    readers: int = 4
    verify: Verify = "first"
    policy: str = "auto"
    prefetch: Prefetch = "off"
    predictor: Predictor = "gate"
    warm: float = DEFAULT_WARM_SECONDS

    def __post_init__(self) -> None:
        if self.kv_type not in KV_ELEMENT_BYTES:
            raise UsageError(
                f"KV type '{self.kv_type}' is unknown; wanted one of {', '.join(KV_ELEMENT_BYTES)}"
            )
        if self.verify not in VERIFY_MODES:
            raise UsageError(
                f"verify mode '{self.verify}' is unknown; wanted one of {', '.join(VERIFY_MODES)}"
            )
        if self.prefetch not in PREFETCH_MODES:
            raise UsageError(
                f"prefetch mode '{self.prefetch}' is unknown; wanted one of {', '.join(PREFETCH_MODES)}"
            )
        if self.predictor not in PREDICTORS:
            raise UsageError(
                f"predictor '{self.predictor}' is unknown; wanted one of {', '.join(PREDICTORS)}"
            )
        policy_named(self.policy)
        if not 0 <= self.warm <= 86400:
            raise UsageError(f"warm is {self.warm} seconds; wanted 0 to 86400")
        if self.prefetch == "on" and self.readers < 2:
            raise UsageError("prefetch 'on' needs 2 readers or more: one is kept for demand reads")
        for name, low, high in (
            ("context", 1, 2**24),
            ("chunk", 1, 2**16),
            ("threads", 1, 1024),
            ("readers", 1, 64),
        ):
            value = getattr(self, name)
            if value is None and name != "readers":
                continue
            if not isinstance(value, int) or not low <= value <= high:
                raise UsageError(f"{name} is {value!r}; wanted {low} to {high}")
        if not self.devices:
            raise UsageError("no device given; wanted cpu or cuda:N")
        for device in self.devices:
            kind, _, index = str(device).partition(":")
            if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
                raise UsageError(f"device '{device}' is unknown; wanted cpu, cuda or cuda:N")
        if len({d.partition(":")[0] for d in self.devices}) > 1:
            raise UsageError("layers cannot be split between cpu and cuda yet; name devices of one kind")
        if self.vram is not None and self.devices[0].startswith("cpu"):
            raise UsageError("a VRAM budget needs a CUDA device; on the CPU set the memory budget")
