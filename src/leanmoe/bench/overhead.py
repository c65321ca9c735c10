"""Where a token's time goes when all is in memory: `python -m leanmoe.bench.overhead PACK`

A decode step is divided into *kernels* (calls of the C++ extension), *reads* (time for which it waited for experts)
and the *rest*: the interpreter, torch's dispatch, the look-ups in the cache. Counted beside it are the calls of the
extension, torch's operations and python's calls: no clock disturbs those. (A recorded step is one call of the
extension, `Tape.run`, for as far as all that it wants is in memory.)

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


def measure(work: Workload, tokens: int, clock: Callable[[], float]) -> list[Split]:
    """The time of each of `tokens` tokens by `clock`."""
    found = list[Split]()
    with clocked(clock) as kernels:

        def now() -> Split:
            return Split(clock(), kernels.seconds, work.llm.stats.stall_seconds)

        for _ in range(tokens):
            begun = now()
            work.token()
            found.append(now() - begun)
    return found


def count(work: Workload) -> Counts:
    """What one token takes."""
    operations, calls = _TorchWatch(), Counter[str]()

    def profile(frame: Any, event: str, argument: Any) -> None:
        calls[event] += 1

    with clocked() as kernels, operations:
        work.token()
    sys.setprofile(profile)
    work.token()
    sys.setprofile(None)
    return Counts(kernels.names.copy(), operations.calls.copy(), calls["call"], calls["c_call"])


def report(work: Workload, tokens: int) -> dict[str, Any]:
    """All of it as plain values: counts, and seconds of a token."""
    clocks = {"wall": time.perf_counter, "cpu": time.thread_time}
    counts = count(work)
    found: dict[str, Any] = {
        "layers": len(work.llm.decoder.layers),
        "residency": work.llm.plan.residency,
        "kernel_calls": counts.kernels.total(),
        "torch_operations": counts.torch.total(),
        "python_calls": counts.python,
        "native_calls": counts.native,
        "kernels": dict(counts.kernels.most_common()),
        "torch": dict(counts.torch.most_common()),
    }
    return found | {name: _summary(measure(work, tokens, clock)) for name, clock in clocks.items()}


def _summary(splits: list[Split]) -> dict[str, dict[str, float]]:
    columns = {name: [getattr(s, name) for s in splits] for name in PARTS}
    return {name: {"least": min(x), "median": statistics.median(x)} for name, x in columns.items()}


def text(found: dict[str, Any]) -> str:
    """The tables."""
    lines = [f"{found['layers']} layers, {found['residency']:.0%} of the experts resident", ""]
    lines += ["| a token, in microseconds | least | median | cpu, least |", "| --- | --- | --- | --- |"]
    for part in PARTS:
        wall, cpu = found["wall"][part], found["cpu"][part]
        cells = (f"{1e6 * t:.0f}" for t in (wall["least"], wall["median"], cpu["least"]))
        lines.append(f"| {part} | {' | '.join(cells)} |")
    lines += ["", "| a token | calls |", "| --- | --- |"]
    for name in ("kernel_calls", "torch_operations", "python_calls", "native_calls"):
        lines.append(f"| {name.replace('_', ' ')} | {found[name]} |")
    for kind in ("kernels", "torch"):
        lines += ["", f"{kind}: {', '.join(f'{name} {n}' for name, n in found[kind].items())}"]
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
