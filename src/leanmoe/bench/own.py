"""One run of lean in this process: `python -m leanmoe.bench.own PACK [FLAGS]`; the prompt on standard input.

One JSON record goes to standard output. Ctrl-C ends the answer after the token being computed, and the record then
says how far it came.
"""

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from leanmoe import kernels
from leanmoe.engine.config import EngineConfig
from leanmoe.engine.llm import LLM
from leanmoe.engine.memory import peak_bytes
from leanmoe.engine.speed import Test, measure
from leanmoe.experts.stats import CacheStats
from leanmoe.kernels.clock import clocked


def _text(path: Path, config: EngineConfig, prompt: str, tokens: int, warm: bool) -> dict[str, Any]:
    """The greedy continuation of `prompt`; with `warm` all experts that have slots are read before."""
    begun = time.perf_counter()
    with LLM(path, **asdict(config)) as llm:
        opened = time.perf_counter() - begun
        if warm:
            llm.load_all()
        stream = llm.stream(prompt, max_tokens=tokens + 1, temperature=0, ignore_eos=True)
        signal.signal(signal.SIGINT, lambda signum, frame: stream.cancel())
        at_chunks = [0.0]
        with clocked() as clock:
            stream.watch_prompt(lambda done, total: at_chunks.append(clock.seconds))
            text = "".join(stream)
        in_prompt = at_chunks[-1]
        done = stream.completion
        assert done is not None
        usage, fed = done.usage, max(1, done.usage.completion_tokens - 1)
        record = {
            "text": text,
            "prompt_tokens": usage.prompt_tokens,
            "decode_tokens": usage.completion_tokens - 1,
            "finished": done.finish_reason != "cancelled",
            "prompt_tokens_per_second": usage.prompt_rate,
            "decode_tokens_per_second": usage.decode_rate,
            **_account("prompt", usage.prompt_experts, usage.prompt_seconds, in_prompt, usage.prompt_tokens),
            **_account("decode", usage.decode_experts, usage.decode_seconds, clock.seconds - in_prompt, fed),
        }
        plan = llm.plan
        held = plan.trunk_bytes + plan.slot_bytes + sum(device.state for device in plan.devices)
        record |= {"open_seconds": opened, "trunk_bytes": plan.trunk_bytes}
        facts = _facts(plan.residency, plan.memory)
        return record | facts | {"memory_beside": facts["memory_peak"] - held}


def _random(path: Path, config: EngineConfig, prompt: int, tokens: int, warm: bool) -> dict[str, Any]:
    """Random tokens, as a prompt and then, in an empty context, one by one."""
    record: dict[str, Any] = {"finished": True}
    wanted = [Test("prompt", prompt)] if prompt else []
    for test in [*wanted, Test("decode", tokens)] if tokens else wanted:
        speed = measure(path, config, test, repetitions=3 if warm else 1, warm_up=warm, feed="random")
        seconds = sum(s.seconds for s in speed.samples)
        number = test.tokens * len(speed.samples)
        kind = test.kind
        record |= {f"{kind}_tokens": test.tokens, f"{kind}_tokens_per_second": speed.rate}
        record |= _account(kind, speed.experts, seconds, speed.kernel_seconds * number, number)
        record |= _facts(speed.residency, speed.memory)
    return record


def _account(
    phase: str, experts: CacheStats, seconds: float, in_kernels: float, tokens: int
) -> dict[str, Any]:
    """Where a token's time went, and what was read for it."""
    parts = {"kernel": in_kernels, "stall": experts.stall_seconds}
    parts["rest"] = max(0.0, seconds - sum(parts.values()))
    return {
        **{f"{phase}_{name}_seconds": value / tokens for name, value in parts.items()},
        f"{phase}_hit_rate": experts.hit_rate,
        f"{phase}_read_bytes": (experts.read_bytes - experts.warm_bytes) / tokens,
        f"{phase}_read_rate": experts.read_rate,
    }


def _facts(residency: float, budget: int) -> dict[str, Any]:
    return {
        "residency": residency,
        "memory_budget": budget,
        "memory_peak": peak_bytes(),
        "threads": kernels.get_num_threads(),
        "isa": kernels.isa(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--memory", type=int, help="budget in bytes")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, required=True, help="to feed one by one")
    parser.add_argument("--random", type=int, help="so many random tokens for a prompt, in place of text")
    parser.add_argument("--warm", action="store_true", help="fill the slots before anything is measured")
    options = parser.parse_args()
    config = EngineConfig(
        memory=options.memory, context=options.context, threads=options.threads, warm=0, learn=False
    )
    if options.random is None:
        record = _text(options.pack, config, sys.stdin.read(), options.tokens, options.warm)
    else:
        record = _random(options.pack, config, options.random, options.tokens, options.warm)
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
