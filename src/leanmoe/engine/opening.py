"""Opening a packed model: from its directory and a configuration to a network in memory, within the budget."""

import logging
import os
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from leanmoe import kernels
from leanmoe.engine.config import EngineConfig
from leanmoe.engine.learning import Learner, model_identity
from leanmoe.engine.memory import default_budget, machine_bytes, resident_bytes, return_large_blocks
from leanmoe.engine.plan import MemoryPlan, plan_memory
from leanmoe.engine.sequence import Sequence
from leanmoe.engine.tuning import choice_for, find_tuned
from leanmoe.errors import BudgetError, UnsupportedError, UsageError
from leanmoe.experts.policy import Key, policy_named
from leanmoe.experts.pool import ExpertPool, Observer, Placement
from leanmoe.models.decoder import Decoder
from leanmoe.models.registry import model_spec
from leanmoe.models.spec import ModelSpec
from leanmoe.models.state import KV_TYPES
from leanmoe.models.trunk import Trunk
from leanmoe.pack import Pack, open_pack
from leanmoe.text import Tokenizer, file_tokenizer
from leanmoe.units import format_bytes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """A packed model in memory, with all that answers are made of; whoever opened it closes it.

    `config` has a value for every setting. `pool` and `learner` are None for a model without experts. `sequence` has
    room for the plan's context. `warming` are the reads of the warm start. `pack.trunk` lacks the vocabulary, which is
    the tokenizer's.
    """

    pack: Pack
    spec: ModelSpec
    tokenizer: Tokenizer
    config: EngineConfig
    plan: MemoryPlan
    pool: ExpertPool | None
    learner: Learner | None
    decoder: Decoder
    sequence: Sequence
    warming: list[Future[bool]]

    def close(self) -> None:
        """Stops the threads and lets the slots go. May be called twice."""
        if self.pool is not None:
            self.pool.close()
        self.decoder.close()


def open_model(path: str | Path, config: EngineConfig, observers: SequenceOf[Observer] = ()) -> Opened:
    """Opens the pack at `path`; `observers` are told of every routing.

    Raises what `LLM` says.
    """
    return_large_blocks()
    pack = open_pack(path)
    spec = model_spec(pack.trunk)
    tokenizer = file_tokenizer(pack.trunk, spec.vocab)
    pack = replace(pack, trunk=pack.trunk.without_vocabulary())  # which is the tokenizer's now
    config, plan = _planned(pack, spec, config)
    watched = bool(observers or config.recording)
    learner: Learner | None = None
    if pack.manifest.layers:
        learner = Learner(pack, config.recording_bytes, probabilities=config.record_probabilities)
        observers = (*observers, learner) if config.recording_bytes else observers
    with ExitStack() as undo:
        pool = _open_pool(pack, spec, plan, config, observers)
        if pool is not None:
            undo.callback(pool.close)
        decoder = _load(pack, spec, plan, pool, whole=watched)
        undo.callback(decoder.close)
        warming = _use_profile(pack, config, learner, pool, decoder)
        sequence = Sequence(decoder.new_state(plan.context, KV_TYPES[config.kv_type]))
        undo.pop_all()
    return Opened(pack, spec, tokenizer, config, plan, pool, learner, decoder, sequence, warming)


def warm_start(pool: ExpertPool | None, config: EngineConfig, hottest: Iterable[Key]) -> list[Future[bool]]:
    """As `LLM.warm_start`; nothing where there are no experts, or `config` does without."""
    return [] if pool is None or not config.warm else pool.warm(hottest, config.warm)


def _planned(pack: Pack, spec: ModelSpec, config: EngineConfig) -> tuple[EngineConfig, MemoryPlan]:
    """The configuration with everything settled, and the plan for it. Sets the number of compute threads."""
    memory = config.memory or default_budget()
    if memory > (there := machine_bytes()):
        _log.warning("a budget of %s: there are %s in all", format_bytes(memory), format_bytes(there))
    threads = config.threads or len(os.sched_getaffinity(0))
    chosen = choice_for(find_tuned(pack.path), memory)
    config = replace(config.settled(chosen), memory=memory, threads=threads)
    kernels.set_num_threads(threads)
    on_gpu = config.devices[0] != "cpu"
    vram = tuple(_vram(device, config.vram) for device in config.devices) if on_gpu else ()
    base = resident_bytes()
    plan = plan_memory(spec, pack.trunk, pack.manifest, config, memory=memory, base=base, vram=vram)
    return config, plan


def _open_pool(
    pack: Pack, spec: ModelSpec, plan: MemoryPlan, config: EngineConfig, observers: SequenceOf[Observer]
) -> ExpertPool | None:
    placements = [
        Placement(d.device, d.slots.slot_bytes, [n for n in d.layers if n in spec.moe_layers])
        for d in plan.devices
        if d.slots is not None
    ]
    assert config.readers is not None
    assert config.policy is not None
    assert config.prefetch is not None
    if not placements:
        if config.prefetch == "on" or config.policy != "auto":
            raise UsageError(f"{pack.path}: a model without experts has no use for prefetch or policy")
        return None
    return ExpertPool.open(
        pack,
        placements,
        readers=config.readers,
        verify=config.verify,
        policy=policy_named(config.policy),
        prefetch=config.prefetch,
        prefetch_level=config.prefetch_level,
        predictor=config.predictor,
        observers=observers,
    )


def _load(pack: Pack, spec: ModelSpec, plan: MemoryPlan, pool: ExpertPool | None, *, whole: bool) -> Decoder:
    """Reads the trunk, each layer to the device that the plan has for it. `whole` as `Decoder` has it."""
    where = [torch.device(d.device) for d in plan.devices for _ in d.layers]

    def device_of(name: str) -> torch.device:
        if name.startswith("blk."):
            return where[int(name.split(".")[1])]
        return where[0] if name == "token_embd.weight" else where[-1]

    trunk = Trunk.load(pack.trunk, pack.trunk_digest, device_of)
    decoder = Decoder(spec, trunk, pool, where, whole=whole)
    trunk.check_all_taken()
    return decoder


def _use_profile(
    pack: Pack,
    config: EngineConfig,
    learner: Learner | None,
    pool: ExpertPool | None,
    decoder: Decoder,
) -> list[Future[bool]]:
    """Warms the cache with the experts that were used most, and tells the predictor what followed what."""
    if learner is None or pool is None:
        return []
    profile = learner.open(model_identity(decoder, pack.manifest))
    if profile is None:
        return []
    pool.seed(profile)
    return warm_start(pool, config, profile.hottest())


def _vram(name: str, wanted: int | None) -> int:
    """The bytes to use of a GPU. Raises `UnsupportedError` if torch sees no such GPU, `BudgetError` if it has less."""
    if not torch.cuda.is_available() or torch.device(name).index not in (
        None,
        *range(torch.cuda.device_count()),
    ):
        raise UnsupportedError(
            f"device {name} is not there: torch sees {torch.cuda.device_count()} CUDA devices"
        )
    free, _ = torch.cuda.mem_get_info(torch.device(name))
    if wanted is not None and wanted > free:
        raise BudgetError(f"{name} has {format_bytes(free)} free; the VRAM budget is {format_bytes(wanted)}")
    return free * 9 // 10 if wanted is None else wanted
