"""The feed-forward half of a layer: routed experts (with an optional shared one), or a dense FFN."""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from leanmoe.experts.cache import Acquire
from leanmoe.experts.policy import Phase
from leanmoe.experts.pool import ExpertPool
from leanmoe.kernels import (
    ExpertBatch,
    add,
    aside,
    empty,
    expert_input,
    glu,
    linear,
    linear_group,
    moe_ffn,
    moe_some,
    moe_token,
    put_tokens,
    sigmoid_gate,
    weighted_sum,
)
from leanmoe.models.batch import parts
from leanmoe.models.lookahead import Foresight, Watcher
from leanmoe.models.norm import RMSNorm
from leanmoe.models.routing import Router, Routing
from leanmoe.models.spec import ModelSpec
from leanmoe.models.trunk import Trunk

Places = Sequence[int] | npt.NDArray[np.int64]
_FEW_PLACES = 64  # up to which plain lists are faster


class FeedForward(Protocol):
    def __call__(self, h: torch.Tensor, phase: Phase) -> torch.Tensor:
        """h [N, hidden], the state after attention -> what is to be added to it, [N, hidden]."""


class DenseFFN:
    """`down(act(gate x) * up x)`, where `act` is silu or gelu. `suffix` is "" or "_shexp" (the shared expert)."""

    def __init__(self, trunk: Trunk, spec: ModelSpec, width: int, layer: int, suffix: str = "") -> None:
        prefix, hidden = f"blk.{layer}.ffn_", spec.hidden
        self.activation = "gelu" if spec.activation == "gelu" else "silu"
        self.gate = trunk.weight(f"{prefix}gate{suffix}.weight", width, hidden)
        self.up = trunk.weight(f"{prefix}up{suffix}.weight", width, hidden)
        self.gate_and_up = linear_group([self.gate, self.up])
        self.down = trunk.weight(f"{prefix}down{suffix}.weight", hidden, width)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, hidden] -> [N, hidden]."""
        gate, up = self.gate_and_up(x)
        return linear(self.down, glu(gate, up, self.activation))


class Dense:
    """A layer's dense FFN, with the norm before it."""

    def __init__(self, ffn: DenseFFN, norm: RMSNorm) -> None:
        self.ffn, self.norm = ffn, norm

    def __call__(self, h: torch.Tensor, phase: Phase) -> torch.Tensor:
        """As `FeedForward`."""
        return self.ffn(self.norm(h))


class SharedExpert:
    """A dense FFN beside the routed experts, scaled by `sigmoid(w x)` where the model has such a gate."""

    def __init__(self, trunk: Trunk, spec: ModelSpec, layer: int) -> None:
        self.ffn = DenseFFN(trunk, spec, spec.shared_width, layer, "_shexp")
        name = f"blk.{layer}.ffn_gate_inp_shexp.weight"
        self.gate = trunk.weight(name, 1, spec.hidden) if trunk.has(name) else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, hidden] -> [N, hidden]."""
        y = self.ffn(x)
        return y if self.gate is None else sigmoid_gate(y, linear(self.gate, x))


class MoE:
    """`y = sum over the top-k of w_j * expert_j(x)`, plus the shared expert, where x is the state h under a norm.

    The shared expert comes first, then a token's experts in the order of their numbers, so that the bits of the sum
    depend neither on what was resident nor on the tokens beside it. In a prompt they arrive in that order and are added
    as they come; what a decode step's experts say, which arrive in any order, is kept apart until all have spoken.
    """

    def __init__(self, trunk: Trunk, spec: ModelSpec, layer: int, pool: ExpertPool, norm: RMSNorm) -> None:
        assert spec.router is not None
        self.layer, self.pool, self.norm, self.activation = layer, pool, norm, spec.activation
        self.router = Router(trunk, spec.router, spec.hidden, layer)
        self.layout = pool.layout(layer)
        has_shared = trunk.has(f"blk.{layer}.ffn_up_shexp.weight")
        self.shared = SharedExpert(trunk, spec, layer) if has_shared else None
        self.look_ahead: Watcher | None = None
        self.foresight: Foresight | None = None
        # Where the file scales what the router sees, that is h under a norm of its own.
        self.router_norm = norm
        if trunk.has(scale := f"blk.{layer}.ffn_gate_inp.scale"):
            weight = trunk.vector(scale, spec.hidden) * spec.hidden**-0.5
            self.router_norm = RMSNorm(weight, spec.eps)

    def __call__(self, h: torch.Tensor, phase: Phase, onto: torch.Tensor | None = None) -> torch.Tensor:
        """h [N, hidden] -> onto + y, or y alone, [N, hidden]. Raises `ExpertReadError` if an expert cannot be read.

        In a prefill the memory of `onto`, which may be that of h, takes the sum.
        """
        if phase is Phase.PREFILL:
            return self._prefill(h, onto)
        x = self.norm(h)
        routing = self._route(h, x)
        n, k = routing.ids.shape
        outputs = empty((n * k, h.shape[1]), device=h.device)
        visit = _Visit(self, phase, x, h, routing, outputs)
        if self.pool.observes(phase):
            aside(visit.tell)
        done = self._compute_resident(routing.ids, x, outputs)
        aside(visit.fetch, done=done)
        if self.shared is not None:  # reads are on their way meanwhile
            shared = self.shared(x)
            onto = shared if onto is None else add(onto, shared)
        aside(visit.compute, done=done)
        return weighted_sum(outputs.view(n, k, -1), routing.weights, routing.ids, onto)

    def _prefill(self, h: torch.Tensor, onto: torch.Tensor | None) -> torch.Tensor:
        """Of many tokens, what is normed is made for some at a time: once to be rounded, once for the shared expert."""
        tokens = expert_input(self.layout, len(h), h.device)
        routing = Routing.joined([self._taken(h[rows], tokens[rows]) for rows in parts(len(h))])
        out = empty(h.shape, device=h.device).zero_() if onto is None else onto
        visit = _Visit(self, Phase.PREFILL, tokens, h, routing, out)
        if self.pool.observes(Phase.PREFILL):
            visit.tell(None)
        visit.fetch(None)
        if self.shared is not None:
            for rows in parts(len(h)):
                add(out[rows], self.shared(self.norm(h[rows])), out=out[rows])
        visit.compute(None)
        return out

    def _taken(self, h: torch.Tensor, tokens: torch.Tensor) -> Routing:
        """States h [N, hidden] of a prompt, put into rows `tokens` of the experts' input."""
        x = self.norm(h)
        put_tokens(self.layout, x, tokens)
        return self._route(h, x)

    def _route(self, h: torch.Tensor, x: torch.Tensor) -> Routing:
        return self.router(x if self.router_norm is self.norm else self.router_norm(h))

    def _compute_resident(
        self, ids: torch.Tensor, x: torch.Tensor, outputs: torch.Tensor
    ) -> torch.Tensor | None:
        """One token's experts, without a word to the pool, if nobody waits for one and all are there: see `aside`."""
        if (
            len(x) > 1
            or self.look_ahead is not None
            or (residents := self.pool.residents(self.layer)) is None
        ):
            return None
        return moe_token(self.layout, residents, ids, x, outputs, self.activation)


class _Visit:
    """What tokens x [N, hidden] of states h want of a layer's experts: fetched, then computed into `outputs`.

    Those are each expert's [N * k, hidden]. In a prefill x is an `expert_input`, and the sums are added to `outputs`
    [N, hidden]. On a tape it comes back, with other numbers in the same tensors.
    """

    def __init__(
        self,
        moe: MoE,
        phase: Phase,
        x: torch.Tensor,
        h: torch.Tensor,
        routing: Routing,
        outputs: torch.Tensor,
    ) -> None:
        self._moe, self._phase, self._x, self._h = moe, phase, x, h
        self._routing, self._outputs = routing, outputs
        self._rows: dict[int, Places] = {}
        self._groups: Acquire | None = None

    def tell(self, _: object) -> None:
        """Tells the routing to those who want to know."""
        moe, told = self._moe, (each.cpu().numpy() for each in self._routing)
        moe.pool.observe(moe.layer, self._phase, *told)

    def fetch(self, _: object) -> None:
        """Pins what is resident, and queues reads of the rest."""
        moe, phase = self._moe, self._phase
        self._rows = _rows_by_expert(self._routing.ids)
        experts = list(self._rows) if phase is Phase.DECODE else sorted(self._rows)
        self._groups = moe.pool.acquire(moe.layer, experts, phase)
        if moe.look_ahead is not None:
            moe.look_ahead(phase, self._h, experts)
        if moe.foresight is not None and phase is Phase.PREFILL:
            moe.foresight(self._h, self._groups)

    def compute(self, _: object) -> None:
        """The experts' products, as they become ready. Raises `ExpertReadError` if one cannot be read."""
        groups, self._groups = self._groups, None
        assert groups is not None
        one_token = self._phase is Phase.DECODE and len(self._x) == 1
        with groups:
            for leases in groups:
                slots = [lease.data for lease in leases]
                mine = [self._rows[lease.expert] for lease in leases]
                if one_token:
                    places = [rows[0] for rows in mine]
                    moe_some(self._moe.layout, slots, places, self._x, self._outputs, self._moe.activation)
                else:
                    self._multiply(slots, mine)

    def _multiply(self, slots: list[torch.Tensor], mine: list[Places]) -> None:
        index = _index(mine, self._routing.ids.shape[1], self._x.device)
        batch = ExpertBatch(slots, [len(rows) for rows in mine], index[0], index[1])
        weights = self._routing.weights.view(-1) if self._phase is Phase.PREFILL else None
        moe_ffn(self._moe.layout, batch, self._x, self._outputs, self._moe.activation, weights)


class DenseBesideMoE:
    """`norm1(dense(x)) + norm2(moe(h))`: the dense FFN and the experts see the state h under different norms."""

    def __init__(self, trunk: Trunk, spec: ModelSpec, layer: int, pool: ExpertPool, norm: RMSNorm) -> None:
        self.dense = Dense(DenseFFN(trunk, spec, spec.dense_width, layer), norm)
        self.dense_norm, self.moe_norm, before_moe = (
            RMSNorm(trunk.vector(f"blk.{layer}.{name}.weight", spec.hidden), spec.eps)
            for name in ("post_ffw_norm_1", "post_ffw_norm_2", "pre_ffw_norm_2")
        )
        self.moe = MoE(trunk, spec, layer, pool, before_moe)

    def __call__(self, h: torch.Tensor, phase: Phase) -> torch.Tensor:
        """As `FeedForward`."""
        routed = self.moe_norm(self.moe(h, phase))
        for rows in parts(len(h)):
            add(self.dense_norm(self.dense(h[rows], phase)), routed[rows], out=routed[rows])
        return routed


def _rows_by_expert(ids: torch.Tensor) -> dict[int, Places]:
    """For ids [N, k], each expert's places in the flattened table; place i belongs to token i // k."""
    if ids.numel() <= _FEW_PLACES:
        rows: dict[int, list[int]] = {}
        for place, expert in enumerate(chain.from_iterable(ids.tolist())):
            rows.setdefault(expert, []).append(place)
        return dict(rows)
    flat = ids.flatten().cpu().numpy()
    # Numbers of 16 bits or fewer are sorted by digits: a tenth of the time.
    order = flat.astype(np.min_scalar_type(flat.max())).argsort(kind="stable")
    begins = np.flatnonzero(np.diff(flat[order], prepend=-1)).tolist()
    ends = [*begins[1:], len(order)]
    return {int(flat[order[a]]): order[a:b] for a, b in zip(begins, ends, strict=True)}


def _index(rows: Sequence[Places], k: int, device: torch.device) -> torch.Tensor:
    """The tokens of the places in `rows`, and the places: int32 [2, number of places].

    Each of torch's operations here costs a token more than it does in a loop of its own: they let go of the
    interpreter, which the readers want too.
    """
    if sum(map(len, rows)) <= _FEW_PLACES:
        few = [*chain.from_iterable(rows)]
        index = np.array([[place // k for place in few], few], np.int32)
    else:
        places = np.concatenate(rows)
        index = np.empty((2, len(places)), np.int32)
        index[1] = places
        np.floor_divide(index[1], k, out=index[0])
    shared = torch.from_numpy(index)
    return shared if device.type == "cpu" else shared.to(device)
