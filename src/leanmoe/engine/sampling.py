"""Choosing the next token from logits."""

import math
from collections import Counter
from dataclasses import dataclass, fields
from numbers import Integral
from typing import TypedDict

import torch

from leanmoe.errors import LeanError, UsageError
from leanmoe.kernels import largest
from leanmoe.models.one_thread import one_torch_thread


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`, as keyword arguments."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_window: int
    seed: int | None


def sampling_params(options: SamplingOptions) -> "SamplingParams":
    """The parameters of keyword arguments. Raises `UsageError` for one that does not exist or is out of range."""
    known = [each.name for each in fields(SamplingParams)]
    for name in options:
        if name not in known:
            raise UsageError(f"there is no option {name!r}; sampling takes {', '.join(known)}")
    return SamplingParams(**options)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn. Applied in this order: penalties, top_k, top_p, min_p, temperature.

    `temperature` 0 takes the most likely token. `top_k` 0, `top_p` 1, `min_p` 0 and the penalties' neutral
    values switch each one off. The penalties look at the last `penalty_window` tokens.
    Raises `UsageError` for values out of range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64
    seed: int | None = None

    def __post_init__(self) -> None:
        wanted = {
            "temperature": (0 <= self.temperature <= 100, "0 to 100"),
            "top_k": (isinstance(self.top_k, Integral) and self.top_k >= 0, "a whole number, 0 or more"),
            "top_p": (0 < self.top_p <= 1, "above 0, at most 1"),
            "min_p": (0 <= self.min_p <= 1, "0 to 1"),
            "repeat_penalty": (0 < self.repeat_penalty <= 100, "above 0, at most 100"),
            "presence_penalty": (abs(self.presence_penalty) <= 100, "-100 to 100"),
            "frequency_penalty": (abs(self.frequency_penalty) <= 100, "-100 to 100"),
            "penalty_window": (
                isinstance(self.penalty_window, Integral) and self.penalty_window >= 0,
                "a whole number, 0 or more",
            ),
            "seed": (
                self.seed is None or (isinstance(self.seed, Integral) and 0 <= self.seed < 2**63),
                "a whole number, 0 to 2^63 - 1",
            ),
        }
        for name, (ok, text) in wanted.items():
            if not ok:
                raise UsageError(f"{name} is {getattr(self, name)}; wanted {text}")


class Sampler:
    """Draws tokens for one sequence; the same seed and logits give the same tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(int(params.seed))

    @one_torch_thread()
    def __call__(self, logits: torch.Tensor, history: list[int]) -> int:
        """The next token from logits [vocab] after the tokens `history`. Raises `LeanError` if one is not finite."""
        p = self.params
        # A pass or two over the vocabulary, whatever is asked for; a NaN is both the least and the largest.
        if not all(map(math.isfinite, (float(each) for each in logits.aminmax()))):
            raise LeanError("the model's logits are not finite numbers: its weights are damaged or overflow")
        logits = self._penalised(logits, history)
        if p.temperature == 0:
            return int(largest(logits, 1)[1])
        keep = min(p.top_k, logits.numel()) if p.top_k else logits.numel()
        top, ids = largest(logits, keep)
        probs = top.softmax(-1)
        # A token stays while the ones before it hold less than top_p, so the first one always stays.
        allowed = (probs.cumsum(-1) - probs < p.top_p) & (probs >= p.min_p * probs[0])
        weights = (top / p.temperature).masked_fill(~allowed, float("-inf")).softmax(-1)
        return int(ids[torch.multinomial(weights, 1, generator=self._generator)])

    def _penalised(self, logits: torch.Tensor, history: list[int]) -> torch.Tensor:
        p = self.params
        neutral = p.repeat_penalty == 1 and p.presence_penalty == 0 and p.frequency_penalty == 0
        if neutral or not p.penalty_window or not history:
            return logits
        recent = Counter(history[-p.penalty_window :])
        ids, counts = torch.tensor(list(recent)), torch.tensor(list(recent.values()))
        seen = logits[ids]
        seen = torch.where(seen > 0, seen / p.repeat_penalty, seen * p.repeat_penalty)
        seen = seen - p.presence_penalty - counts * p.frequency_penalty
        return logits.scatter(0, ids, seen)
