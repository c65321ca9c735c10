"""Measuring a pack on this machine, and choosing how to run it: what `lean tune` does.

Nothing is chosen on theory alone. Reader threads: by reading the pack's own files. Policy: by replaying routing that
was just recorded, with the slots that the budget buys. Prefetch: by decoding with every level in turn, a token each.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from leanmoe.engine.config import Choice, EngineConfig
from leanmoe.engine.estimate import replayed
from leanmoe.engine.llm import LLM
from leanmoe.engine.sample import PROMPTS
from leanmoe.engine.tuning import TRACE, Measured, Tuned, keep, this_host
from leanmoe.errors import UsageError
from leanmoe.experts.policy import POLICIES, Key, policy_named
from leanmoe.experts.profile import DISTANCES
from leanmoe.experts.recall import recalls
from leanmoe.experts.store import ExpertStore
from leanmoe.experts.throttle import Prefetch, Survey
from leanmoe.experts.trace import RoutingTrace
from leanmoe.pack import Pack, open_pack

THREADS = (1, 2, 4, 8)
"""Numbers of reader threads that are tried."""
_READ_BYTES = 512 << 20  # read with each number of threads
_MIN_GAIN = 0.03  # of the read rate, that more threads must bring
_MIN_POINTS = 0.02  # of the hit rate, that another policy than the default must bring: the trace is short
_TRACE_BYTES = 32 << 20
_JUDGED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Findings:
    """What was chosen, and why.

    `hit_rates` of each policy on `trace`; `recall` of "routers" and "transitions", by how many layers ahead, if they
    name top-k experts or twice as many; `rates` bytes per second by number of reader threads; `levels` for each
    prefetch level the mean logarithm of a token's time over that without, and its standard error: empty where every
    expert has a slot. `seconds` is the median time of a token without reading ahead, `stall_seconds` of it waiting.
    """

    tuned: Tuned
    trace: RoutingTrace
    hit_rates: dict[str, float]
    recall: dict[str, dict[int, list[float]]]
    levels: dict[int, tuple[float, float]]
    seconds: float
    stall_seconds: float
    residency: float


def tune(
    path: Path, config: EngineConfig, *, tokens: int, report: Callable[[str], None] = lambda step: None
) -> Findings:
    """Measures the pack at `path` with the budget of `config`, and keeps what was chosen in the pack.

    `tokens` are decoded to record routing, and as many at each prefetch level. Raises `UsageError` for a model
    without experts, what `LLM` raises, and `OSError` if the pack cannot be written to.
    """
    pack = open_pack(path)
    if not pack.manifest.layers:
        raise UsageError(f"{path}: a model without experts has nothing to tune")
    report("reading expert files")
    rates = read_rates(pack)
    readers = fewest_readers(rates)
    report("recording routing")
    plain = replace(
        config, policy="auto", prefetch="off", prefetch_level=None, readers=readers, recording=_TRACE_BYTES
    )
    with LLM(path, **asdict(plain)) as llm:
        memory = llm.plan.memory
        slots = [d.slots for d in llm.plan.devices if d.slots is not None]
        residency = llm.plan.residency
        seconds, stall = _decode(llm, tokens)
        report("asking the predictors")
        top_k = pack.manifest.expert_used_count
        gates = llm.decoder.judge_look_ahead([top_k, 2 * top_k], DISTANCES)
        _decode(llm, _JUDGED_TOKENS)
    trace = llm.trace()
    trace.save(pack.path / TRACE)
    report("replaying policies")
    others = [n for n, kind in POLICIES.items() if not kind.wants_router and kind is not policy_named("auto")]
    hit_rates = {name: replayed(trace, slots, name) for name in ("auto", *others)}
    policy = max(hit_rates, key=lambda name: hit_rates[name] - (0 if name == "auto" else _MIN_POINTS))
    followed = recalls(trace, [top_k, 2 * top_k])
    after = {d: followed[name] for d in range(1, DISTANCES + 1) if (name := f"transition +{d}") in followed}
    recall = {"routers": gates.recall(), "transitions": after}
    levels: dict[int, tuple[float, float]] = {}
    level = 0
    if residency < 1 and readers > 1:
        report("decoding with and without prefetch")
        survey = _survey(path, replace(plain, policy=policy, prefetch="on"), tokens)
        levels, level = survey.gains(), survey.best()
    prefetch: Prefetch = "on" if level else "off"
    choice = Choice(policy, prefetch, level or None, readers)
    tuned = Tuned(this_host(), memory, choice, Measured(seconds - stall, rates))
    keep(pack.path, tuned)
    return Findings(tuned, trace, hit_rates, recall, levels, seconds, stall, residency)


def read_rates(pack: Pack, nbytes: int = _READ_BYTES) -> dict[int, float]:
    """Bytes per second at which `THREADS` threads read whole expert files, random ones, past the page cache.

    The better of two rounds of `nbytes` for each number: other work can only make a disk look slower.
    """
    store = ExpertStore(pack, verify="never")
    keys = [(m.layer, e) for m in pack.manifest.layers for e in range(m.expert_count)]
    largest = max(store.size(layer) for layer, _ in keys)
    shuffled = random.Random(0)
    rates = dict.fromkeys(THREADS, 0.0)
    for _ in range(2):
        for threads in THREADS:
            chosen = shuffled.sample(keys, min(len(keys), max(2 * threads, nbytes // largest)))
            rates[threads] = max(rates[threads], _read_rate(store, chosen, threads, largest))
    return rates


def _read_rate(store: ExpertStore, keys: Sequence[Key], threads: int, largest: int) -> float:
    arena = torch.empty((threads + 1) * largest, dtype=torch.uint8)
    start = -arena.data_ptr() % 4096
    view = memoryview(arena.numpy().data)[start:]

    def read(part: int) -> int:
        mine = view[part * largest : (part + 1) * largest]
        sizes = [store.size(layer) for layer, _ in keys[part::threads]]
        for key, size in zip(keys[part::threads], sizes, strict=True):
            store.read_into(key, mine[:size])
        return sum(sizes)

    with ThreadPoolExecutor(threads) as pool:
        begun = time.perf_counter()
        return sum(pool.map(read, range(threads))) / (time.perf_counter() - begun)


def fewest_readers(rates: dict[int, float]) -> int:
    """The fewest threads that no larger number beats by a few per cent; two at least, one of which may read ahead."""
    best = max(rates.values())
    return max(2, min(n for n, rate in rates.items() if rate >= best * (1 - _MIN_GAIN)))


def _decode(llm: LLM, tokens: int) -> tuple[float, float]:
    """Seconds a token took, and of these waiting for reads, over `tokens` tokens of answers to the sample prompts."""
    taken: list[tuple[float, float]] = []
    for prompt in PROMPTS:
        done = llm.generate(prompt, max_tokens=max(8, tokens // len(PROMPTS)), temperature=0, ignore_eos=True)
        fed = done.usage.completion_tokens - 1
        taken.append((done.usage.decode_seconds / fed, done.usage.decode_experts.stall_seconds / fed))
    return statistics.median(t for t, _ in taken), statistics.median(s for _, s in taken)


def _survey(path: Path, config: EngineConfig, tokens: int) -> Survey:
    with LLM(path, **asdict(config)) as llm:
        survey = llm.survey_prefetch()
        whole = tokens * len(survey.seconds)
        for prompt in PROMPTS:
            llm.generate(prompt, max_tokens=max(16, whole // len(PROMPTS)), temperature=0, ignore_eos=True)
        return survey
