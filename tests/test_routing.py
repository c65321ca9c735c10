"""Routing: every published way to choose experts, against a plain account of it, one token at a time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from leanmoe.models.routing import Router, Routing
from leanmoe.models.spec import RouterSpec

EXPERTS, HIDDEN, TOKENS = 16, 8, 40
PLAIN = RouterSpec(EXPERTS, 4)
WAYS = {
    "softmax": PLAIN,
    "not renormalised": replace(PLAIN, renormalise=False),
    "scaled": replace(PLAIN, scale=2.5),
    "sigmoid": replace(PLAIN, gating="sigmoid"),
    "chosen softmax": replace(PLAIN, gating="chosen_softmax", renormalise=False),
    "root of softplus": replace(PLAIN, gating="sqrt_softplus"),
    "best groups by two": replace(PLAIN, gating="sigmoid", groups=4, groups_used=2),
    "best groups by one": replace(PLAIN, groups=8, groups_used=3, group_score="max"),
}


class _Tensors:
    """A trunk that holds a router."""

    def __init__(self, *, bias: bool, selection_bias: bool) -> None:
        from leanmoe.formats.quant_types import quant_type
        from leanmoe.kernels import Weight

        noise = torch.Generator().manual_seed(3)
        self.matrix = torch.randn(EXPERTS, HIDDEN, generator=noise) / 2
        self.vectors = {"blk.5.ffn_gate_inp.bias": torch.randn(EXPERTS, generator=noise)} if bias else {}
        if selection_bias:
            self.vectors["blk.5.exp_probs_b.bias"] = torch.randn(EXPERTS, generator=noise) / 4
        data = torch.from_numpy(self.matrix.numpy().view(np.uint8).ravel())
        self._weight = Weight(data, quant_type("F32"), (EXPERTS, HIDDEN))

    def weight(self, name: str, rows: int, cols: int) -> Any:
        assert (name, rows, cols) == ("blk.5.ffn_gate_inp.weight", EXPERTS, HIDDEN)
        return self._weight

    def vector_if_present(self, name: str, size: int) -> torch.Tensor | None:
        return self.vectors.get(name)


def _plainly(spec: RouterSpec, logits: list[float], bias: list[float]) -> tuple[list[int], list[float]]:
    """Ids and weights of one token, in python's own arithmetic."""
    x = np.array(logits, np.float64)
    ways: dict[str, Callable[[], Any]] = {
        "softmax": lambda: np.exp(x) / np.exp(x).sum(),
        "sigmoid": lambda: 1 / (1 + np.exp(-x)),
        "chosen_softmax": lambda: x,
        "sqrt_softplus": lambda: np.sqrt(np.log1p(np.exp(x))),
    }
    given = ways[spec.gating]()
    scores = [float(g) + b for g, b in zip(given, bias, strict=True)]
    size = EXPERTS // spec.groups
    many = 1 if spec.group_score == "max" else 2
    worth = [sum(sorted(scores[g * size : (g + 1) * size])[-many:]) for g in range(spec.groups)]
    kept = sorted(range(spec.groups), key=lambda g: -worth[g])[: spec.groups_used]
    possible = [e for e in range(EXPERTS) if e // size in kept]
    ids = sorted(possible, key=lambda e: -scores[e])[: spec.top_k]
    weights = [float(given[e]) for e in ids]
    if spec.gating == "chosen_softmax":
        weights = [float(w) for w in np.exp(weights) / np.exp(weights).sum()]
    if spec.renormalise:
        weights = [w / sum(weights) for w in weights]
    return ids, [w * spec.scale for w in weights]


def _routed(spec: RouterSpec, trunk: _Tensors) -> tuple[Router, torch.Tensor, Routing]:
    router = Router(trunk, spec, HIDDEN, 5)  # type: ignore[arg-type]
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4))
    return router, x, router(x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("selection_bias", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_experts_and_weights_are_those_of_the_plain_account(
    way: str, selection_bias: bool, bias: bool
) -> None:
    """A model that asks for other experts than it was trained with talks almost sense."""
    trunk = _Tensors(bias=bias, selection_bias=selection_bias)
    spec = WAYS[way]
    _, x, (ids, weights, _) = _routed(spec, trunk)
    logits = x @ trunk.matrix.T + trunk.vectors.get("blk.5.ffn_gate_inp.bias", 0)
    added = trunk.vectors.get("blk.5.exp_probs_b.bias", torch.zeros(EXPERTS)).tolist()
    for token in range(TOKENS):
        want_ids, want_weights = _plainly(spec, logits[token].tolist(), added)
        assert ids[token].tolist() == want_ids
        torch.testing.assert_close(weights[token], torch.tensor(want_weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("selection_bias", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_what_traces_and_look_ahead_are_told_ranks_as_the_choice_does(way: str, selection_bias: bool) -> None:
    """Else prefetch would read experts that win on probability alone, and caches would keep them."""
    router, x, routing = _routed(WAYS[way], _Tensors(bias=True, selection_bias=selection_bias))
    for told in (routing.chances, router.ranking(x)):
        assert told.topk(4, dim=-1).indices.tolist() == routing.ids.tolist()
    assert routing.chances.min() >= 0
    assert routing.chances.max() <= 1


def test_one_token_far_from_all_experts_has_finite_weights() -> None:
    """The sum of sigmoids can underflow; the weights must not become infinite."""
    from leanmoe.models.routing import pick

    tiny = torch.full((1, EXPERTS), 1e-30)
    _, weights = pick(tiny, tiny, replace(PLAIN, gating="sigmoid"))
    assert torch.isfinite(weights).all()
    assert float(weights.sum()) < 1e-20
