"""Sampling options do what users of other engines expect of their names."""

from collections import Counter

import pytest
import torch

from leanmoe.engine.sampling import Sampler, SamplingParams
from leanmoe.errors import UsageError

LOGITS = torch.tensor([1.0, 4.0, 3.0, -2.0, 3.9])


def _drawn(history: list[int] | None = None, n: int = 300, **params: float) -> Counter[int]:
    sampler = Sampler(SamplingParams(**{"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3, **params}))  # type: ignore[arg-type]
    return Counter(sampler(LOGITS, history or []) for _ in range(n))


def test_temperature_zero_takes_the_likeliest() -> None:
    assert _drawn(temperature=0) == {1: 300}


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    def run(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed))
        return [sampler(LOGITS, []) for _ in range(50)]

    assert run(1) == run(1) != run(2)


def test_top_k_top_p_and_min_p_cut_the_tail() -> None:
    assert set(_drawn(top_k=2)) == {1, 4}
    probs = LOGITS.softmax(-1)
    assert set(_drawn(top_p=float(probs[1]) + 0.01)) == {1, 4}
    assert set(_drawn(top_p=0.001)) == {1}
    assert set(_drawn(min_p=0.85)) == {1, 4}
    assert set(_drawn(n=3000, temperature=3.0)) == {0, 1, 2, 3, 4}


def test_frequencies_follow_the_probabilities() -> None:
    counts, probs = _drawn(n=20000, temperature=1.0), LOGITS.softmax(-1)
    for token, p in enumerate(probs.tolist()):
        assert counts[token] / 20000 == pytest.approx(p, abs=0.02)


def test_penalties_turn_the_choice_away_from_what_was_said() -> None:
    assert _drawn([1], temperature=0, repeat_penalty=1.5) == {4: 300}
    assert _drawn([1], temperature=0, presence_penalty=0.5) == {4: 300}
    assert _drawn([1, 1, 4], temperature=0, frequency_penalty=0.2) == {4: 300}
    assert _drawn([1] + [0] * 64, temperature=0, repeat_penalty=1.5) == {1: 300}


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_k": -1},
        {"min_p": 2},
        {"seed": -1},
    ],
)
def test_values_out_of_range_are_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        SamplingParams(**bad)  # type: ignore[arg-type]
