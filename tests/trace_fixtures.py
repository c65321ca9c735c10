"""Made-up routing for tests, and the recorded traces where they are at hand."""

from pathlib import Path

import numpy as np
import pytest

from leanmoe.experts.policy import Phase
from leanmoe.experts.recorder import TraceRecorder
from leanmoe.experts.trace import LayerFacts, RoutingTrace
from leanmoe.experts.trace_csv import import_csv

RECORDED = Path(__file__).resolve().parents[2] / "shared" / "traces"


def recorded(name: str) -> RoutingTrace:
    """One of the recorded traces; skips the test where they are not installed."""
    path = RECORDED / f"{name}.route.csv"
    if not path.exists():
        pytest.skip(f"needs the recorded trace {path}")
    return import_csv(path)


def facts(sizes: dict[int, int], experts: int) -> dict[int, LayerFacts]:
    return {layer: LayerFacts(experts, size) for layer, size in sizes.items()}


def made_up(
    sizes: dict[int, int],
    experts: int,
    top_k: int,
    tokens: int,
    *,
    seed: int = 0,
    prompt: int = 0,
    skew: float = 1.0,
    sticky: float = 0.0,
    subject: int = 0,
    foresight: float | None = None,
) -> RoutingTrace:
    """`tokens` decoded after `prompt` ones. Popularity falls with rank ** -skew; `sticky` favours what the last
    token used; after every `subject` tokens other experts are popular. With `foresight`, router probabilities
    are recorded, in which the next token's picks have that share more than chance.
    """
    rng = np.random.default_rng(seed)
    recorder = TraceRecorder(
        "made-up", "test", top_k, facts(sizes, experts), probabilities=experts if foresight is not None else 0
    )
    scores = np.zeros((prompt + tokens + 1, len(sizes), experts))
    last = np.zeros((len(sizes), experts))
    popular = np.stack([rng.permutation(experts) for _ in sizes])
    picks = np.zeros((prompt + tokens + 1, len(sizes), top_k), np.int64)
    for t in range(prompt + tokens + 1):
        if subject and t % subject == 0:
            popular = np.stack([rng.permutation(experts) for _ in sizes])
        scores[t] = rng.gumbel(size=popular.shape) - skew * np.log1p(popular) + sticky * last
        picks[t] = np.argsort(-scores[t], axis=1)[:, :top_k]
        last = np.zeros_like(last)
        np.put_along_axis(last, picks[t], 1, axis=1)
    chunks = [(Phase.PREFILL, range(prompt))] if prompt else []
    for phase, chunk in [*chunks, *((Phase.DECODE, range(t, t + 1)) for t in range(prompt, prompt + tokens))]:
        for row, layer in enumerate(sizes):
            chosen = picks[list(chunk), row]
            given = None
            if foresight is not None:
                given = np.full((len(chosen), experts), (1 - foresight) / experts)
                after = picks[[t + 1 for t in chunk], row]
                np.put_along_axis(given, after, np.take_along_axis(given, after, 1) + foresight / top_k, 1)
            recorder.record(phase, layer, chosen, rng.random(chosen.shape), given)
    return recorder.trace()
