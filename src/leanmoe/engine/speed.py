"""Measuring a pack's speed in this process, without tokenizing: what `lean bench` does.

A test feeds tokens drawn from a fixed seed, as a prompt or one by one, and is repeated with other tokens. Every test
starts with a fresh model: with no expert in memory or, if all of them have slots and it may warm up, with every expert.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from leanmoe import kernels
from leanmoe.engine.config import EngineConfig
from leanmoe.engine.llm import LLM
from leanmoe.engine.memory import peak_bytes
from leanmoe.engine.sampling import Sampler, SamplingParams
from leanmoe.engine.sequence import decode, prefill
from leanmoe.errors import UsageError
from leanmoe.experts.stats import CacheStats
from leanmoe.kernels.clock import clocked

Feed = Literal["greedy", "random"]
"""Which token comes next in decode tests: the likeliest after the last, or a random one."""


@dataclass(frozen=True, slots=True)
class Test:
    """Feeding `tokens` tokens after `depth` others: as a "prompt", or one by one ("decode")."""

    kind: Literal["prompt", "decode"]
    tokens: int
    depth: int = 0

    __test__ = False

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.depth < 0:
            raise UsageError(
                f"a test of {self.tokens} tokens at depth {self.depth}; wanted 1 or more, and 0 or more"
            )

    @property
    def name(self) -> str:
        """As llama-bench writes it: pp512, tg64, tg64 @ d4096."""
        return (
            {"prompt": "pp", "decode": "tg"}[self.kind]
            + str(self.tokens)
            + (f" @ d{self.depth}" if self.depth else "")
        )

    @property
    def context(self) -> int:
        """Tokens that the sequence must hold."""
        return max(self.depth, 1 if self.kind == "decode" else 0) + self.tokens


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition: `seconds` in all, of them `kernels` in the C++ extension, and what became of the look-ups."""

    seconds: float
    kernels: float
    experts: CacheStats


@dataclass(frozen=True, slots=True)
class Speed:
    """One test's repetitions in one process.

    `first` is the one from an empty expert cache; it warms up and counts in no mean. It is None if it was not asked
    for, and `samples` then begin cold. `residency` is the share of the experts' bytes that have slots, `memory` the
    budget, `peak` the most that the process ever held.
    """

    test: Test
    tokens_fed: Feed
    first: Sample | None
    samples: tuple[Sample, ...]
    all_resident: bool
    residency: float
    memory: int
    peak: int
    threads: int
    isa: str
    model: str
    model_bytes: int

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each repetition."""
        return [self.test.tokens / s.seconds for s in self.samples]

    @property
    def rate(self) -> float:
        """Their mean."""
        return statistics.mean(self.rates)

    @property
    def deviation(self) -> float:
        """Their standard deviation, that of a sample; 0.0 of a single one."""
        return statistics.stdev(self.rates) if len(self.samples) > 1 else 0.0

    @property
    def first_rate(self) -> float | None:
        """Tokens a second from an empty cache, if that was measured apart."""
        return None if self.first is None else self.test.tokens / self.first.seconds

    @property
    def experts(self) -> CacheStats:
        """Look-ups and reads of all repetitions."""
        return sum((s.experts for s in self.samples), CacheStats())

    @property
    def read_bytes(self) -> float:
        """Expert bytes read for each token."""
        return self.experts.read_bytes / self._tokens

    @property
    def kernel_seconds(self) -> float:
        """Time of a token in the C++ extension."""
        return sum(s.kernels for s in self.samples) / self._tokens

    @property
    def stall_seconds(self) -> float:
        """Time of a token waiting for reads, with nothing to compute."""
        return self.experts.stall_seconds / self._tokens

    @property
    def rest_seconds(self) -> float:
        """Time of a token in everything else: the interpreter, torch, looking experts up."""
        whole = sum(s.seconds for s in self.samples) / self._tokens
        return max(0.0, whole - self.kernel_seconds - self.stall_seconds)

    @property
    def _tokens(self) -> int:
        return self.test.tokens * len(self.samples)

    def record(self) -> dict[str, Any]:
        """Everything as plain values; sizes in bytes, times in seconds."""
        return {
            "test": self.test.name,
            **asdict(self.test),
            "tokens_fed": self.tokens_fed,
            "model": self.model,
            "model_bytes": self.model_bytes,
            "threads": self.threads,
            "isa": self.isa,
            "memory_budget": self.memory,
            "residency": self.residency,
            "all_resident": self.all_resident,
            "tokens_per_second": self.rate,
            "deviation": self.deviation,
            "samples": self.rates,
            "cold_tokens_per_second": self.first_rate,
            "hit_rate": self.experts.hit_rate if self.experts.total.lookups else None,
            "read_bytes_per_token": self.read_bytes,
            "read_rate": self.experts.read_rate,
            "kernel_seconds_per_token": self.kernel_seconds,
            "stall_seconds_per_token": self.stall_seconds,
            "rest_seconds_per_token": self.rest_seconds,
            "memory_peak": self.peak,
        }


def measure(
    path: Path,
    config: EngineConfig,
    test: Test,
    *,
    repetitions: int = 5,
    warm_up: bool = True,
    feed: Feed = "greedy",
    report: Callable[[str], None] = lambda step: None,
) -> Speed:
    """Opens the pack at `path` and measures `test`. The context is as long as the test needs, unless `config` says.

    With `warm_up` there is one more repetition, before the others, and experts that all have slots are read first. The
    pack's profile neither warms the cache nor learns.

    Raises `UsageError` if the context does not hold the test, and what `LLM` raises.
    """
    if config.context is None:
        config = replace(config, context=test.context)
    config = replace(config, warm=0, learn=False)
    report(f"{test.name}: opening")
    with LLM(path, **asdict(config)) as llm:
        if llm.plan.context < test.context:
            raise UsageError(f"{test.name} takes {test.context} tokens of context; it is {llm.plan.context}")
        all_resident = llm.plan.residency == 1
        if all_resident and warm_up:
            report(f"{test.name}: reading all experts")
            llm.load_all()
        samples = []
        for turn in range(repetitions + warm_up):
            report(f"{test.name}: {turn + 1} of {repetitions + warm_up}")
            samples.append(_sample(llm, test, turn, feed))
        first = samples.pop(0) if warm_up else None
        return Speed(
            test=test,
            tokens_fed="random" if test.kind == "prompt" else feed,
            first=None if all_resident else first,
            samples=tuple(samples),
            all_resident=all_resident,
            residency=llm.plan.residency,
            memory=llm.plan.memory,
            peak=peak_bytes(),
            threads=kernels.get_num_threads(),
            isa=kernels.isa(),
            model=llm.pack.path.stem,
            model_bytes=llm.plan.experts + llm.plan.trunk_bytes,
        )


def _sample(llm: LLM, test: Test, seed: int, feed: Feed) -> Sample:
    draw = random.Random(seed)
    ids = [draw.randrange(llm.spec.vocab) for _ in range(test.context)]
    before = test.context - test.tokens
    with llm.sequence() as sequence:
        logits = prefill(llm.decoder, sequence, ids[:before], llm.plan.chunk) if before else None
        if test.kind == "prompt":
            wanted = ids[before:]

            def run() -> None:
                prefill(llm.decoder, sequence, wanted, llm.plan.chunk)
        else:
            assert logits is not None
            pick = Sampler(SamplingParams(temperature=0)) if feed == "greedy" else _Listed(ids[before:])
            source = decode(llm.decoder, sequence, logits, pick, lambda: False)
            next(source)  # the first token's logits are the prompt's

            def run() -> None:
                for _ in islice(source, test.tokens):
                    pass

        earlier, begun = llm.stats, time.perf_counter()
        with clocked() as clock:
            run()
        return Sample(time.perf_counter() - begun, clock.seconds, llm.stats - earlier)


class _Listed:
    """In place of a sampler: tokens from a list, and the last one again and again."""

    def __init__(self, tokens: list[int]) -> None:
        self._left = iter(tokens)
        self._last = tokens[-1]

    def __call__(self, logits: torch.Tensor, history: list[int]) -> int:
        return next(self._left, self._last)
