"""Where every byte of a budget goes, before anything is loaded. Reads headers only, so it takes milliseconds.

`budget = fixed + trunk + state (KV) + scratch + expert slots`: all but the slots is reserved first.
"""

import os
import re
from dataclasses import dataclass

from leanmoe.engine.config import KV_ELEMENT_BYTES, EngineConfig
from leanmoe.engine.memory import default_budget
from leanmoe.errors import BudgetError, FormatError, UsageError
from leanmoe.experts.predict import Transitions
from leanmoe.experts.slots import SlotPlan, plan_slots, slot_floor
from leanmoe.formats.gguf import GGUFFile
from leanmoe.models.spec import PART, ModelSpec
from leanmoe.pack import Manifest, is_expert_tensor
from leanmoe.units import format_bytes

DEFAULT_CONTEXT = 4096
CHUNKS = (8192, 4096, 2048, 1024, 512, 256, 128, 64, 32)
_RESIDENT_CHUNK = 2048  # more is hardly faster where nothing is read
_MODEST_CHUNK = 512
_CHUNK_SHARE = 10  # scratch of a larger chunk may take one in this many of the bytes that slots could have

# Beyond the process as it stands when planned: reader and compute threads, allocator slack, library pages
# touched later, the kernel's own tables. On the demo model the peak is within 10 MiB of all that the plan names.
_FIXED_MARGIN = 40 << 20
# A process before its weights, for a plan made by another one: interpreter, torch and lean's own libraries.
_RUNTIME_BYTES = 280 << 20
# A tokenizer takes at most about this much for each token of its vocabulary (text, merges, hash tables), most of it
# while it is made; of byte-level ones 220 stay.
_TOKENIZER_BYTES = 900
# By how much a process, before its weights, may differ from the last one that ran the same command.
_BASE_VARIES = 4 << 20
# Pinned staging and the CUDA runtime's own host memory, for each GPU.
_CUDA_HOST_BYTES = 600 << 20
_CUDA_DEVICE_BYTES = 500 << 20
# HIDDEN_BYTES, PART_BYTES and MIN_WAVE of csrc/ffn.cpp, and TILE of csrc/kernels.h.
_HIDDEN_BYTES, _PART_BYTES, _LEAST_PAIRS, _TILE = 4 << 20, 1 << 20, 256, 64
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """One device's share: layers, and the bytes it holds of each kind. `slots` is None for a dense model."""

    device: str
    layers: range
    budget: int
    trunk: int
    state: int
    scratch: int
    slots: SlotPlan | None

    @property
    def used(self) -> int:
        return self.trunk + self.state + self.scratch + (self.slots.slot_bytes if self.slots else 0)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The budget's breakdown. `fixed` is host memory that holds no weights; `experts` all expert files' bytes.

    `smallest_memory` is the least host memory that would work with the same context and the smallest chunk: whole
    MiB, rounded up, so that it may be written in a command.
    """

    memory: int
    fixed: int
    context: int
    chunk: int
    experts: int
    smallest_memory: int
    devices: tuple[DevicePlan, ...]

    @property
    def host_used(self) -> int:
        return self.fixed + sum(d.used for d in self.devices if d.device == "cpu")

    @property
    def trunk_bytes(self) -> int:
        return sum(d.trunk for d in self.devices)

    @property
    def slot_bytes(self) -> int:
        return sum(d.slots.slot_bytes for d in self.devices if d.slots)

    @property
    def residency(self) -> float:
        """Share of the experts' bytes that fits the slots, 0 to 1; 1 for a dense model."""
        return min(1.0, self.slot_bytes / self.experts) if self.experts else 1.0

    @property
    def below_working_set(self) -> bool:
        """Whether one token's experts, over all layers, do not fit: then an LRU would hit almost nothing."""
        return any(d.slots is not None and d.slots.below_working_set for d in self.devices)


def context_length(spec: ModelSpec, config: EngineConfig) -> int:
    """Tokens of context: the configured number, else the model's own up to 4096.

    Raises `UsageError` above the model's own context length.
    """
    if config.context is None:
        return min(spec.context_length, DEFAULT_CONTEXT)
    if config.context > spec.context_length:
        raise UsageError(
            f"--context {config.context} is more than the model's own {spec.context_length} tokens"
        )
    return config.context


def expected_base(spec: ModelSpec) -> int:
    """What a process will hold before it loads weights, for a plan made before there is one."""
    return _RUNTIME_BYTES + spec.vocab * _TOKENIZER_BYTES


def foresee_memory(spec: ModelSpec, trunk: GGUFFile, manifest: Manifest, config: EngineConfig) -> MemoryPlan:
    """As `plan_memory`, for a process that does not run yet, on devices that nobody asks.

    Raises `UsageError` if a GPU's memory is not given.
    """
    on_gpu = config.devices[0] != "cpu"
    if on_gpu and config.vram is None:
        raise UsageError("say how much the GPU has with --vram: no device is asked")
    return plan_memory(
        spec,
        trunk,
        manifest,
        config,
        memory=config.memory or default_budget(),
        base=expected_base(spec),
        vram=(config.vram or 0,) * len(config.devices) if on_gpu else (),
    )


def plan_memory(
    spec: ModelSpec,
    trunk: GGUFFile,
    manifest: Manifest,
    config: EngineConfig,
    *,
    memory: int,
    base: int,
    vram: tuple[int, ...] = (),
) -> MemoryPlan:
    """Plans a process of `memory` bytes whose `base` bytes are taken before any weight is loaded.

    `trunk` is the pack's trunk, or a whole GGUF whose expert tensors do not count. `vram` gives the bytes of
    each CUDA device. Raises `BudgetError` naming the smallest budget that works, and `FormatError` if the experts
    are not those that `spec` describes.
    """
    _check_experts(spec, manifest, trunk)
    context = context_length(spec, config)
    on_gpu = config.devices[0] != "cpu"
    count = len(config.devices)
    fixed = base + _FIXED_MARGIN + (_CUDA_HOST_BYTES * count if on_gpu else 0) + _knowledge(manifest, config)
    if on_gpu and fixed > memory:
        raise BudgetError(
            f"{format_bytes(memory)} of memory is too small; wanted {format_bytes(fixed)} beside a GPU"
        )
    budgets = tuple(v - _CUDA_DEVICE_BYTES for v in vram) if on_gpu else ((memory - fixed) // count,) * count
    needs = [
        _Needs.of(spec, trunk, manifest, layers, context, config, first=i == 0, last=i == count - 1)
        for i, layers in enumerate(_split_layers(spec.layers, budgets))
    ]
    threads = config.threads or len(os.sched_getaffinity(0))
    cache = None if config.cache is None else config.cache // count
    chunk = config.chunk or _chunk(spec, context, threads, cache, budgets, needs)
    scratch = scratch_bytes(spec, chunk, context, threads)
    least = scratch_bytes(spec, config.chunk or CHUNKS[-1], context, threads)
    smallest = _whole_mib(fixed + (0 if on_gpu else count * max(need.floor(least) for need in needs)))
    for need, budget in zip(needs, budgets, strict=True):
        if budget < need.floor(scratch):
            raise _too_small(
                need, scratch, context, None if on_gpu else fixed, smallest, budget if on_gpu else memory
            )
    devices = tuple(
        DevicePlan(
            name, need.layers, budget, need.trunk, need.state, scratch, need.slots(budget - scratch, cache)
        )
        for name, need, budget in zip(config.devices, needs, budgets, strict=True)
    )
    experts = sum(m.expert_count * m.layout.file_bytes for m in manifest.layers)
    return MemoryPlan(memory, fixed, context, chunk, experts, smallest, devices)


def _knowledge(manifest: Manifest, config: EngineConfig) -> int:
    """What is kept of the routing while the model runs: what is to be learned, and tables that predict."""
    if not manifest.layers:
        return 0
    predicts = config.prefetch in ("auto", "on") and config.predictor != "gate"
    tables = Transitions.nbytes({m.layer: m.expert_count for m in manifest.layers}) if predicts else 0
    return tables + config.recording_bytes


def _check_experts(spec: ModelSpec, manifest: Manifest, trunk: GGUFFile) -> None:
    """The manifest has the experts of the spec: each is read from files of its own, and neither is trusted."""
    half = sorted(spec.moe_layers ^ {m.layer for m in manifest.layers})
    if half:
        raise FormatError(f"{trunk.path}: layer {half[0]} has experts or a router, but not both")
    if spec.router is None:
        return
    if manifest.expert_used_count != spec.router.top_k:
        raise FormatError(
            f"{trunk.path}: a token uses {spec.router.top_k} experts; the manifest says {manifest.expert_used_count}"
        )
    for m in manifest.layers:
        shape = m.layout.sections["gate"].shape
        found, wanted = (m.expert_count, *shape), (spec.router.experts, spec.expert_width, spec.hidden)
        if found != wanted:
            raise FormatError(
                f"{trunk.path}: layer {m.layer} has {found[0]} experts with gates of {found[1:]}; its metadata "
                f"says {wanted[0]} of {wanted[1:]}"
            )


@dataclass(frozen=True, slots=True)
class _Needs:
    """What one device must hold before slots get the rest, and the sizes of its layers' experts."""

    layers: range
    trunk: int
    state: int
    sizes: dict[int, int]
    counts: dict[int, int]
    top_k: int

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        trunk: GGUFFile,
        manifest: Manifest,
        layers: range,
        context: int,
        config: EngineConfig,
        *,
        first: bool,
        last: bool,
    ) -> "_Needs":
        """The embedding lives on the first device, the final norm and the output head on the last."""
        nbytes = 0
        for name, info in trunk.tensors.items():
            if block := _BLOCK.match(name):
                here = int(block[1]) in layers and not is_expert_tensor(name)
            else:
                here = first if name == "token_embd.weight" else last
            nbytes += info.nbytes if here else 0
        element = KV_ELEMENT_BYTES[config.kv_type]
        state = sum(spec.mixers[n].state_bytes(context, element) for n in layers)
        mine = [m for m in manifest.layers if m.layer in layers]
        sizes = {m.layer: m.layout.file_bytes for m in mine}
        counts = {m.layer: m.expert_count for m in mine}
        return cls(layers, nbytes, state, sizes, counts, spec.router.top_k if spec.router else 0)

    def slot_floor(self) -> int:
        return slot_floor(self.sizes, self.counts, self.top_k) if self.sizes else 0

    def floor(self, scratch: int) -> int:
        return self.trunk + self.state + scratch + self.slot_floor()

    def room(self, budget: int, cache: int | None) -> int:
        """Bytes for slots in what is left of `budget` without scratch, at most `cache`."""
        free = budget - self.trunk - self.state
        return free if cache is None else min(free, cache)

    def fits(self, budget: int, cache: int | None) -> bool:
        """Whether all experts have slots in that room: `SlotPlan.fits`, of a plan that need not work."""
        experts = sum(size * self.counts[layer] for layer, size in self.sizes.items())
        return experts <= self.room(budget, cache)

    def slots(self, budget: int, cache: int | None) -> SlotPlan | None:
        """The slots in that room."""
        if cache is not None and cache < self.slot_floor():
            raise BudgetError(
                f"a cache of {format_bytes(cache)} is too small; one layer's experts twice, for each expert size, "
                f"take {format_bytes(self.slot_floor())} ({self.slot_floor()} bytes)"
            )
        room = self.room(budget, cache)
        return plan_slots(self.sizes, self.counts, self.top_k, room) if self.sizes else None


def _chunk(
    spec: ModelSpec,
    context: int,
    threads: int,
    cache: int | None,
    budgets: tuple[int, ...],
    needs: list[_Needs],
) -> int:
    """Prompt tokens per pass, each of which reads all experts: the most whose scratch does not crowd out the slots."""
    both = list(zip(budgets, needs, strict=True))

    def fits(chunk: int) -> bool:
        return all(n.fits(b - scratch_bytes(spec, chunk, context, threads), cache) for b, n in both)

    resident = fits(_MODEST_CHUNK)
    for chunk in CHUNKS:
        scratch, share = scratch_bytes(spec, chunk, context, threads), 1
        if chunk > _MODEST_CHUNK:
            if context <= chunk // 2 or (resident and (chunk > _RESIDENT_CHUNK or not fits(chunk))):
                continue
            share = _CHUNK_SHARE
        if all(b - n.floor(scratch) >= share * scratch for b, n in both):
            return chunk
    return CHUNKS[-1]


def _whole_mib(memory: int) -> int:
    """`memory` with room for what the next process may take more, in whole MiB."""
    return -(-(memory + _BASE_VARIES) // 2**20) << 20


def _too_small(
    need: _Needs, scratch: int, context: int, fixed: int | None, smallest: int, budget: int
) -> BudgetError:
    """`fixed` is None on a GPU; then the smallest budget of that GPU is named instead of `smallest`."""
    parts = {
        "trunk": need.trunk,
        f"KV state for {context} tokens": need.state,
        "scratch": scratch,
        "expert slots at the least": need.slot_floor(),
    }
    if fixed is None:
        smallest = _whole_mib(need.floor(scratch) + _CUDA_DEVICE_BYTES)
        budget += _CUDA_DEVICE_BYTES
    else:
        parts = {"process without weights": fixed, **parts}
    sums = " + ".join(f"{name} {format_bytes(n)}" for name, n in parts.items() if n)
    return BudgetError(
        f"a budget of {format_bytes(budget)} is too small: {sums}; the smallest that works is {smallest >> 20}MiB "
        "(a shorter --context needs less)"
    )


def scratch_bytes(spec: ModelSpec, chunk: int, context: int, threads: int) -> int:
    """Upper estimate of the activations alive at once while `threads` threads compute `chunk` tokens."""
    router, part = spec.router, min(chunk, PART)
    has_dense = spec.dense_beside_experts or len(spec.moe_layers) < spec.layers
    dense = 4 * part * 3 * max(spec.dense_width if has_dense else 0, spec.shared_width)
    mixing = max(mixer.scratch_bytes(part, context, threads) for mixer in set(spec.mixers))
    # Of every token the residual stream; and of those that go together what is normed and what is added.
    streams, experts = chunk + 5 * part, 0
    if router is not None:
        # Of every token what the experts say, where that is not added at once, and what a norm makes of it.
        normed = spec.post_norms or spec.dense_beside_experts
        streams += chunk * (2 if normed else int(spec.residual_scale != 1.0))
        # The tokens rounded and routed, and hidden rows of one expert; and, bounded (csrc/ffn.cpp), hidden rows of all
        # as floats, or those of some experts with these experts' tokens, and hidden rows of all rounded.
        row = 4 * spec.expert_width
        token = 4 * spec.hidden + 8 * router.experts + 48 * router.top_k + row
        rows, pairs = max(_HIDDEN_BYTES, _LEAST_PAIRS * row), chunk * router.top_k
        gathered = threads * _TILE * (row + 4 * spec.hidden) if _TILE * row <= _PART_BYTES else 0
        floats = min(pairs * (row + 4 * spec.hidden), max(rows, gathered))
        experts = chunk * token + floats + min(pairs * row, rows)
    return 4 * streams * spec.hidden + max(mixing, dense + experts) + 3 * 4 * spec.vocab


def _split_layers(layers: int, budgets: tuple[int, ...]) -> list[range]:
    """Consecutive layers for each device, in proportion to its budget."""
    total = sum(max(b, 1) for b in budgets)
    ends = [round(layers * sum(max(b, 1) for b in budgets[: i + 1]) / total) for i in range(len(budgets))]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
