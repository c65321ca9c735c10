"""Measuring a pack's speed in this process, without tokenizing: what `lean bench` does.

A test feeds tokens drawn from a fixed seed, as a prompt or one by one, and is repeated with other tokens. Tests start
with a fresh model: with no expert in memory or, if all of them have slots and it may warm up, with every expert. Those
at several depths follow each other in one model, so that each token of the context is fed once.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch

from leanmoe import kernels
from leanmoe.engine.config import EngineConfig
from leanmoe.engine.llm import LLM
from leanmoe.engine.memory import peak_bytes
from leanmoe.engine.sampling import Sampler, SamplingParams
from leanmoe.engine.sequence import Sequence, decode, prefill
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
        return self.depth + self.tokens


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
    for, and `samples` then begin cold, and at all depths but the first of a process. `context_fed` counts the tokens
    that were fed to bring the context to its depth, for all repetitions together. `residency` is the share of the
    experts' bytes that have slots, `memory` the budget, `peak` the most that the process ever held.
    """

    test: Test
    tokens_fed: Feed
    first: Sample | None
    samples: tuple[Sample, ...]
    context_fed: int
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
            "context_fed": self.context_fed,
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


class Options(TypedDict, total=False):
    """Keyword arguments of `measure`, as `measure_all` has them."""

    repetitions: int
    warm_up: bool
    feed: Feed
    report: Callable[[str], None]


def measure(path: Path, config: EngineConfig, test: Test, **options: Unpack[Options]) -> Speed:
    """Opens the pack at `path` and measures `test`: see `measure_all`."""
    return measure_all(path, config, [test], **options)[0]


def measure_all(
    path: Path,
    config: EngineConfig,
    tests: Iterable[Test],
    *,
    repetitions: int = 5,
    warm_up: bool = True,
    feed: Feed = "greedy",
    report: Callable[[str], None] = lambda step: None,
) -> list[Speed]:
    """Opens the pack at `path` and measures `tests` (at least one), the least depth first: so they are returned.

    The context is as long as they need, unless `config` says. What is in it before a test is fed once: every
    repetition goes back to the test's depth, and the next test goes on from there. Recurrent layers go back to their
    checkpoint, which a prompt that is measured moves: before each of its repetitions the context is fed anew.

    With `warm_up` there is one more repetition of each test, before the others, and experts that all have slots are
    read first. The pack's profile neither warms the cache nor learns.

    Raises `UsageError` if the context does not hold the tests, and what `LLM` raises.
    """
    tests = sorted(tests, key=lambda test: test.depth)
    deepest = max(tests, key=lambda test: test.context)
    if config.context is None:
        config = replace(config, context=deepest.context)
    config = replace(config, warm=0, learn=False)
    report(f"{tests[0].name}: opening")
    with LLM(path, **asdict(config)) as llm:
        if llm.plan.context < deepest.context:
            raise UsageError(
                f"{deepest.name} takes {deepest.context} tokens of context; it is {llm.plan.context}"
            )
        all_resident = llm.plan.residency == 1
        if all_resident and warm_up:
            report(f"{tests[0].name}: reading all experts")
            llm.load_all()
        found: list[Speed] = []
        with llm.sequence() as sequence:
            bench = _Bench(llm, sequence, feed)
            for test in tests:
                before = bench.context_fed
                samples = []
                for turn in range(repetitions + warm_up):
                    report(f"{test.name}: {turn + 1} of {repetitions + warm_up}")
                    samples.append(bench.sample(test))
                first = samples.pop(0) if warm_up else None
                cold = None if all_resident or found else first
                found.append(_speed(llm, test, feed, cold, samples, bench.context_fed - before))
        return found


def _speed(
    llm: LLM, test: Test, feed: Feed, first: Sample | None, samples: list[Sample], context_fed: int
) -> Speed:
    return Speed(
        test=test,
        tokens_fed="random" if test.kind == "prompt" else feed,
        first=first,
        samples=tuple(samples),
        context_fed=context_fed,
        all_resident=llm.plan.residency == 1,
        residency=llm.plan.residency,
        memory=llm.plan.memory,
        peak=peak_bytes(),
        threads=kernels.get_num_threads(),
        isa=kernels.isa(),
        model=llm.pack.path.stem,
        model_bytes=llm.plan.experts + llm.plan.trunk_bytes,
    )


class _Bench:
    """Repeats tests in a model's own sequence. `context_fed` counts the tokens fed outside of any measurement."""

    def __init__(self, llm: LLM, sequence: Sequence, feed: Feed) -> None:
        self._llm, self._sequence, self._feed = llm, sequence, feed
        self._past = random.Random("context")
        self._context: list[int] = []
        self._seeds = count()
        self.context_fed = 0

    def sample(self, test: Test) -> Sample:
        """One repetition of `test`, with tokens that no other had."""
        llm, sequence = self._llm, self._sequence
        self._go_to(test.depth)
        ids = _random_tokens(random.Random(next(self._seeds)), llm.spec.vocab, test.tokens + 1)
        if test.kind == "prompt":
            wanted = ids[: test.tokens]

            def run() -> None:
                prefill(llm.decoder, sequence, wanted, llm.plan.chunk)
        else:
            pick = _Given(ids if self._feed == "random" else ids[:1])
            source = decode(llm.decoder, sequence, torch.empty(0), pick, lambda: False)
            next(source)  # the first token, which is given and not yet fed

            def run() -> None:
                for _ in islice(source, test.tokens):
                    pass

        earlier, begun = llm.stats, time.perf_counter()
        with clocked() as clock:
            run()
        return Sample(time.perf_counter() - begun, clock.seconds, llm.stats - earlier)

    def _go_to(self, depth: int) -> None:
        """Cuts the sequence to the first `depth` tokens of the context, and feeds what is missing of them."""
        more = depth - len(self._context)
        self._context += _random_tokens(self._past, self._llm.spec.vocab, more)
        wanted = self._context[:depth]
        kept = self._sequence.keep_prefix([*wanted, 0])  # one token more is always left to feed: the test's
        if kept < depth:
            prefill(self._llm.decoder, self._sequence, wanted[kept:], self._llm.plan.chunk, opening=0)
            self.context_fed += depth - kept


def _random_tokens(draw: random.Random, vocab: int, number: int) -> list[int]:
    return [draw.randrange(vocab) for _ in range(number)]


class _Given:
    """In place of a sampler: `tokens` in turn, whatever the logits are, and then always the likeliest."""

    def __init__(self, tokens: SequenceOf[int]) -> None:
        self._left = iter(tokens)
        self._likeliest = Sampler(SamplingParams(temperature=0))

    def __call__(self, logits: torch.Tensor, history: list[int]) -> int:
        token = next(self._left, None)
        return self._likeliest(logits, history) if token is None else token
