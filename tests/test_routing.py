"""Routing: every published way to choose experts, against a plain account of it, one token at a time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from leanmoe import kernels
from leanmoe.kernels import torch_step
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("selection_bias", [False, True])
def test_the_extension_routes_as_torch_does(way: str, selection_bias: bool) -> None:
    """A model on a GPU, and traces taken there, would go another way than on the CPU."""
    noise = torch.Generator().manual_seed(5)
    logits = torch.randn(600, EXPERTS, generator=noise) * 2
    bias = torch.randn(EXPERTS, generator=noise) / 4 if selection_bias else None
    ids, weights, chances = kernels.route(logits, bias, WAYS[way])
    for mine, theirs in zip((ids, weights, chances), torch_step.route(logits, bias, WAYS[way]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    for row in (0, 1, 599):
        alone = kernels.route(logits[row : row + 1], bias, WAYS[way])
        for mine, whole in zip(alone, (ids, weights, chances), strict=True):
            assert torch.equal(mine[0], whole[row])


@pytest.mark.parametrize("run", [kernels.route, torch_step.route])
def test_one_token_far_from_all_experts_has_finite_weights(run: Any) -> None:
    """The sum of sigmoids can underflow; the weights must not become infinite."""
    _, weights, _ = run(torch.full((1, EXPERTS), -69.0), None, replace(PLAIN, gating="sigmoid"))
    assert torch.isfinite(weights).all()
    assert float(weights.sum()) < 1e-20


def test_a_damaged_token_still_goes_to_experts_that_exist() -> None:
    """Not-a-numbers end in an error about the logits later on, not in memory that is not there."""
    ids, _, _ = kernels.route(torch.full((1, EXPERTS), torch.nan), None, WAYS["best groups by two"])
    assert len(set(ids[0].tolist())) == 4
    assert all(0 <= i < EXPERTS for i in ids[0].tolist())


def test_routing_that_does_not_fit_is_refused() -> None:
    for rule in (replace(PLAIN, top_k=17), replace(PLAIN, groups=5), replace(PLAIN, groups=8, top_k=3)):
        with pytest.raises(ValueError, match="experts"):
            kernels.route(torch.zeros(1, EXPERTS), None, rule)
    with pytest.raises(ValueError, match="bias"):
        kernels.route(torch.zeros(1, EXPERTS), torch.zeros(3), PLAIN)
