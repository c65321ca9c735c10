"""Where a token's time goes when all is in memory: `python -m leanmoe.bench.overhead PACK`

A decode step is divided into *kernels* (calls of the C++ extension), *reads* (time for which it waited for experts)
and the *rest*: the interpreter, torch's dispatch, the look-ups in the cache. Counted beside it, for each layer and
around them, are the calls of the extension, torch's operations and python's calls: no clock disturbs those.

Each time is the least of all tokens, and the median. "cpu" is what the deciding thread itself computed: other
programs cannot lengthen it, but waits for other threads are not in it.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from leanmoe import LLM
from leanmoe.engine.sampling import Sampler, SamplingParams
from leanmoe.engine.sequence import Sequence, decode, prefill
from leanmoe.errors import LeanError
from leanmoe.kernels.clock import clocked

PARTS = ("whole", "kernels", "reads", "rest")


@dataclass(frozen=True, slots=True)
class Counts:
    """What one token took: `kernels` by name, torch's operations by name, calls of python and of C functions."""

    kernels: Counter[str]
    torch: Counter[str]
    python: int
    native: int

    def __sub__(self, other: "Counts") -> "Counts":
        kernels, operations = self.kernels.copy(), self.torch.copy()
        kernels.subtract(other.kernels)
        operations.subtract(other.torch)
        return Counts(+kernels, +operations, self.python - other.python, self.native - other.native)


@dataclass(frozen=True, slots=True)
class Split:
    """Seconds of one token."""

    whole: float
    kernels: float
    reads: float

    @property
    def rest(self) -> float:
        return self.whole - self.kernels - self.reads

    def __sub__(self, other: "Split") -> "Split":
        return Split(self.whole - other.whole, self.kernels - other.kernels, self.reads - other.reads)


class _TorchWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Workload:
    """A model with everything in memory that may be, in the middle of an answer: in its own `sequence`, still empty."""

    def __init__(self, llm: LLM, sequence: Sequence, past: int, sampling: SamplingParams) -> None:
        self.llm, self._detokenizer = llm, llm.tokenizer.detokenizer()
        llm.load_all()
        prompt = [i * 7919 % llm.spec.vocab for i in range(past)]
        logits = prefill(llm.decoder, sequence, prompt, llm.plan.chunk)
        assert logits is not None
        self._tokens = decode(llm.decoder, sequence, logits, Sampler(sampling), lambda: False)
        self.token()  # drawn from the prompt's logits
        self.token()  # the first one makes what later ones find made

    def token(self) -> None:
        """One token as an answer makes it: the network, the choice of the next token, its text."""
        self._detokenizer.push(next(self._tokens))


def measure(work: Workload, tokens: int, clock: Callable[[], float]) -> tuple[list[Split], list[Split]]:
    """The time of each of `tokens` tokens by `clock`: in the layers, and around them."""
    within, around = list[Split](), list[Split]()

    def now() -> Split:
        return Split(clock(), kernels.seconds, work.llm.stats.stall_seconds)

    def timed(x: torch.Tensor, *args: Any) -> torch.Tensor:
        begun = now()
        for layer in layers:
            x = layer(x, *args)
        within.append(now() - begun)
        return x

    decoder = work.llm.decoder
    layers, devices = decoder.layers, decoder.devices
    decoder.layers, decoder.devices = [timed], devices[:1]  # type: ignore[list-item]
    try:
        with clocked(clock) as kernels:
            for _ in range(tokens):
                begun = now()
                work.token()
                around.append(now() - begun - within[-1])
    finally:
        decoder.layers, decoder.devices = layers, devices
    return within, around


def count(work: Workload) -> tuple[Counts, Counts]:
    """What one token takes within its layers, all of them together, and around them."""
    operations = _TorchWatch()
    calls = Counter[str]()
    within = Counts(Counter(), Counter(), 0, 0)

    def now() -> Counts:
        return Counts(kernels.names.copy(), operations.calls.copy(), calls["call"], calls["c_call"])

    def counted(layer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any) -> torch.Tensor:
            nonlocal within
            before = now()
            out = layer(*args)
            spent = now() - before
            within = Counts(
                within.kernels + spent.kernels,
                within.torch + spent.torch,
                within.python + spent.python,
                within.native + spent.native,
            )
            return out

        return run

    def profile(frame: Any, event: str, argument: Any) -> None:
        calls[event] += 1

    decoder = work.llm.decoder
    layers = decoder.layers
    decoder.layers = [counted(layer) for layer in layers]  # type: ignore[misc]
    try:
        with clocked() as kernels, operations:
            work.token()
        sys.setprofile(profile)
        work.token()
        sys.setprofile(None)
    finally:
        decoder.layers = layers
    return within, now() - within


def report(work: Workload, tokens: int) -> dict[str, Any]:
    """All of it as plain values, for one layer and for what is around the layers: counts, and seconds of a token."""
    clocks = {"wall": time.perf_counter, "cpu": time.thread_time}
    layers = len(work.llm.decoder.layers)
    counts = count(work)
    times = {name: measure(work, tokens, clock) for name, clock in clocks.items()}
    found: dict[str, Any] = {"layers": layers, "residency": work.llm.plan.residency}
    for place, (name, share) in enumerate((("layer", layers), ("around", 1))):
        seconds = {clock: _summary(split[place], share) for clock, split in times.items()}
        found[name] = seconds | _plain(counts[place], share)
    return found


def _summary(splits: list[Split], share: int) -> dict[str, dict[str, float]]:
    columns = {name: [getattr(s, name) / share for s in splits] for name in PARTS}
    return {name: {"least": min(x), "median": statistics.median(x)} for name, x in columns.items()}


def _plain(counts: Counts, share: int) -> dict[str, Any]:
    return {
        "kernel_calls": counts.kernels.total() / share,
        "torch_operations": counts.torch.total() / share,
        "python_calls": counts.python / share,
        "native_calls": counts.native / share,
        "kernels": {name: n / share for name, n in counts.kernels.most_common()},
        "torch": {name: n / share for name, n in counts.torch.most_common()},
    }


def text(found: dict[str, Any]) -> str:
    """The tables."""
    lines = [f"{found['layers']} layers, {found['residency']:.0%} of the experts resident", ""]
    lines += ["| microseconds a token | one layer: least, median, cpu | around: least, median, cpu |"]
    lines += ["| --- | --- | --- |"]
    for part in PARTS:
        cells = []
        for place in ("layer", "around"):
            wall, cpu = found[place]["wall"][part], found[place]["cpu"][part]
            cells.append(", ".join(f"{1e6 * t:.0f}" for t in (wall["least"], wall["median"], cpu["least"])))
        lines.append(f"| {part} | {' | '.join(cells)} |")
    lines += ["", "| calls | one layer | around |", "| --- | --- | --- |"]
    for name in ("kernel_calls", "torch_operations", "python_calls", "native_calls"):
        cells = [f"{found[place][name]:.1f}" for place in ("layer", "around")]
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |")
    for place in ("layer", "around"):
        for kind in ("kernels", "torch"):
            names = (f"{name} {n:.3g}" for name, n in found[place][kind].items())
            lines += ["", f"{place}, {kind}: {', '.join(names)}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="A resident decode step: kernels, reads, and the rest.")
    parser.add_argument("pack", type=Path)
    parser.add_argument("--tokens", type=int, default=64, help="tokens to time")
    parser.add_argument("--past", type=int, default=64, help="tokens of the prompt before them")
    parser.add_argument("--temperature", type=float, default=0.8, help="of sampling; 0 takes the likeliest")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of tables")
    options = parser.parse_args()
    context = options.past + 2 * options.tokens + 8
    with LLM(options.pack, context=context) as llm, llm.sequence() as sequence:
        sampling = SamplingParams(temperature=options.temperature, seed=0)
        work = Workload(llm, sequence, options.past, sampling)
        found = report(work, options.tokens)
    print(json.dumps(found) if options.json else text(found))


if __name__ == "__main__":
    try:
        main()
    except LeanError as error:
        sys.exit(f"bench: {error}")
