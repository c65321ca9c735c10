"""The decoder: embedding, layers of mixer and feed-forward, output head. The whole network in one page."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from leanmoe.experts.policy import Phase
from leanmoe.experts.pool import ExpertPool
from leanmoe.kernels import (
    Workspace,
    add,
    aside,
    embed,
    empty,
    give_back_freed,
    linear,
    recording,
    scaled,
    turn,
    working_in,
)
from leanmoe.models.attention import Attention
from leanmoe.models.batch import Batch, parts
from leanmoe.models.delta_net import DeltaNet
from leanmoe.models.latent_attention import LatentAttention
from leanmoe.models.lookahead import Foresight, Gate, GateRecall, attach
from leanmoe.models.moe import Dense, DenseBesideMoE, DenseFFN, FeedForward, MoE
from leanmoe.models.norm import RMSNorm
from leanmoe.models.one_thread import one_torch_thread
from leanmoe.models.rope import RopeTables
from leanmoe.models.spec import AttentionSpec, DeltaNetSpec, LatentAttentionSpec, ModelSpec
from leanmoe.models.state import LayerState, SequenceState
from leanmoe.models.steps import Steps
from leanmoe.models.trunk import Trunk


class Cancelled(Exception):
    """Somebody asked to stop, and a pass was given up between two layers."""


class Mixer(Protocol):
    """The half of a layer in which tokens see those before them. It is made with the norm that the state comes under.

    With `recordable` a token passes through kernels alone, so that it may be recorded.
    """

    @property
    def recordable(self) -> bool: ...

    def new_state(self, capacity: int, dtype: torch.dtype) -> LayerState:
        """What the layer keeps of a new sequence with room for `capacity` tokens; `dtype` is that of KV caches."""

    def __call__(self, h: torch.Tensor, batch: Batch, tables: RopeTables) -> torch.Tensor:
        """States h [N, hidden] -> what is to be added to them; takes the N tokens into their sequences' memories."""

    def remember(self, h: torch.Tensor, batch: Batch, tables: RopeTables) -> None:
        """Only takes the N tokens into their sequences' memories."""


# Kind of `MixerSpec` -> its layer class, made from (trunk, model spec, mixer spec, layer, norm).
_MIXERS: dict[type, Any] = {
    AttentionSpec: Attention,
    DeltaNetSpec: DeltaNet,
    LatentAttentionSpec: LatentAttention,
}


class Part(NamedTuple):
    """Rows of a pass that go through a mixer together."""

    rows: slice
    batch: Batch
    tables: RopeTables


class Layer:
    """`h = x + s mixer(norm1(x)); y = h + s ffn(norm2(h))`, where `s` is the residual scale.

    Some models norm what is added, and scale y as a whole.
    """

    def __init__(self, trunk: Trunk, spec: ModelSpec, index: int, pool: ExpertPool | None) -> None:
        prefix, self.scale = f"blk.{index}.", spec.residual_scale
        norm1 = RMSNorm(trunk.vector(prefix + "attn_norm.weight", spec.hidden), spec.eps)
        mixer = spec.mixers[index]
        self.mixer: Mixer = _MIXERS[type(mixer)](trunk, spec, mixer, index, norm1)
        norm2 = RMSNorm(trunk.vector(f"{prefix}{spec.norm2}.weight", spec.hidden), spec.eps)
        self.ffn: FeedForward
        if index in spec.moe_layers:
            assert pool is not None
            self.ffn = (DenseBesideMoE if spec.dense_beside_experts else MoE)(trunk, spec, index, pool, norm2)
        else:
            self.ffn = Dense(DenseFFN(trunk, spec, spec.dense_width, index), norm2)
        self.post1: RMSNorm | None = None
        self.post2: RMSNorm | None = None
        if spec.post_norms:
            self.post1, self.post2 = (
                RMSNorm(trunk.vector(f"{prefix}{name}.weight", spec.hidden), spec.eps)
                for name in ("post_attention_norm", "post_ffw_norm")
            )
        scale = trunk.vector_if_present(prefix + "layer_output_scale.weight", 1)
        self.output_scale = 1.0 if scale is None else float(scale)

    def __call__(self, x: torch.Tensor, phase: Phase, through: Sequence[Part]) -> torch.Tensor:
        """x [N, hidden] -> [N, hidden]. Of several parts, the memory of x takes what is made of it."""
        if len(through) == 1:
            h = self._plus(x, self._mixed(x, through[0]), self.post1)
            return scaled(self._fed(h, phase), self.output_scale)
        for part in through:
            self._mix_in(x, part)
        if self.moe is None:
            for part in through:
                h = x[part.rows]
                self._fed(h, phase, h)
        else:
            x = self._fed(x, phase, x)
        return scaled(x, self.output_scale)

    def of_wanted(self, x: torch.Tensor, batch: Batch, through: Sequence[Part]) -> torch.Tensor:
        """x [N, hidden], whose memory it uses -> [rows wanted, hidden]. Parts without any are only remembered."""
        for part in through:
            if len(part.batch.logit_rows):
                self._mix_in(x, part)
            else:
                self.mixer.remember(x[part.rows], part.batch, part.tables)
        return scaled(self._fed(x[batch.logit_rows.to(x.device)], batch.phase), self.output_scale)

    def _mix_in(self, x: torch.Tensor, part: Part) -> None:
        """Adds to these rows of x what the mixer says of them."""
        h = x[part.rows]
        self._plus(h, self._mixed(h, part), self.post1, h)

    def _fed(self, h: torch.Tensor, phase: Phase, out: torch.Tensor | None = None) -> torch.Tensor:
        """h and what the FFN adds to it, which may be in the memory of h, or in that of `out`."""
        if isinstance(self.ffn, MoE) and self.post2 is None and self.scale == 1.0:
            return self.ffn(h, phase, h)
        return self._plus(h, self.ffn(h, phase), self.post2, out)

    def _mixed(self, x: torch.Tensor, part: Part) -> torch.Tensor:
        if self.mixer.recordable or recording() is None:
            return self.mixer(x, part.batch, part.tables)
        out = empty(x.shape)
        aside(lambda now: out.copy_(self.mixer(x, now, RopeTables(now.positions))), part.batch)
        return out

    def _plus(
        self, x: torch.Tensor, more: torch.Tensor, norm: RMSNorm | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return add(x, more if norm is None else norm(more), self.scale, out)

    @property
    def moe(self) -> MoE | None:
        """The layer's routed experts."""
        ffn = self.ffn.moe if isinstance(self.ffn, DenseBesideMoE) else self.ffn
        return ffn if isinstance(ffn, MoE) else None


class Decoder:
    """A network over a trunk in memory and a pool of experts; `devices[i]` computes layer i.

    The last layer of a prompt is computed for the tokens whose logits are wanted, unless it is to be `whole` for those
    who watch its routing.
    """

    def __init__(
        self,
        spec: ModelSpec,
        trunk: Trunk,
        pool: ExpertPool | None,
        devices: list[torch.device],
        *,
        whole: bool = False,
    ) -> None:
        self.spec, self.devices, self._whole = spec, devices, whole
        self.embedding = trunk.weight("token_embd.weight", spec.vocab, spec.hidden)
        self.layers = [Layer(trunk, spec, i, pool) for i in range(spec.layers)]
        if pool is not None:
            self._look_ahead(pool)
        self.norm = RMSNorm(trunk.vector("output_norm.weight", spec.hidden), spec.eps)
        tied = not trunk.has("output.weight")
        self.output = self.embedding if tied else trunk.weight("output.weight", spec.vocab, spec.hidden)
        self._workspace = Workspace()
        self._steps = Steps(
            partial(self._through, cancelled=None), recorded=all(d.type == "cpu" for d in devices)
        )

    def new_state(self, capacity: int, dtype: torch.dtype) -> SequenceState:
        """An empty sequence with room for `capacity` tokens."""
        return SequenceState([layer.mixer.new_state(capacity, dtype) for layer in self.layers], capacity)

    def close(self) -> None:
        """Lets go of the slots' memory; the network may still be used."""
        self._steps.forget()

    def judge_look_ahead(self, widths: Sequence[int], distances: int) -> GateRecall:
        """From now on counts what the routers of later layers foresee, in place of what the pool is told.

        Only of layers on the device of the first one with experts.
        """
        first = next(layer.moe.layer for layer in self.layers if layer.moe is not None)
        moes, gates = self._gates(self.devices[first])
        recall = GateRecall(gates, widths, distances)
        self._steps.forget()  # which may not have been recorded with a watcher
        for place, moe in enumerate(moes):
            moe.look_ahead = recall.watcher(place)
        return recall

    def _look_ahead(self, pool: ExpertPool) -> None:
        """Lets each layer's picks and state predict the layers after it that are on the same device."""
        for device in dict.fromkeys(self.devices):
            moes, gates = self._gates(device)
            for moe, gate in zip(moes, gates[1:], strict=False):
                if self._whole or gate.layer < len(self.layers) - 1:
                    moe.foresight = Foresight(pool, gate)
            if pool.predicting:
                for moe, ahead in zip(moes, attach(pool, gates), strict=True):
                    moe.look_ahead = ahead

    def _gates(self, device: torch.device) -> tuple[list[MoE], list[Gate]]:
        """The layers with experts on `device`, in order, and what their routers see and are."""
        routed = (layer.moe for layer in self.layers if layer.moe is not None)
        here = [moe for moe in routed if self.devices[moe.layer] == device]
        return here, [Gate(moe.layer, moe.router_norm, moe.router) for moe in here]

    @torch.inference_mode()
    @one_torch_thread()
    def forward(self, batch: Batch, cancelled: Callable[[], bool] | None = None) -> torch.Tensor:
        """Logits [rows wanted, vocab] float32 on the CPU. Every sequence in the batch advances by its tokens.

        `cancelled` is asked before each layer. If an expert cannot be read, or with `Cancelled`, the sequences keep
        the length they had, or that of their checkpoint if they have a recurrent layer (see `SequenceState`), and
        may be continued later.
        """
        if int(batch.tokens.min()) < 0 or int(batch.tokens.max()) >= self.spec.vocab:
            raise ValueError(f"token ids must be 0 to {self.spec.vocab - 1}")
        try:
            with working_in(self._workspace) if len(batch.tokens) > 1 else nullcontext():
                x = self._steps(batch) if cancelled is None else self._through(batch, cancelled)
                x = x[batch.logit_rows.to(x.device)] if len(x) > len(batch.logit_rows) else x.clone()
        except BaseException:
            for s in batch.segments:
                s.state.abandon(s.rows.stop - s.rows.start)
            raise
        for s in batch.segments:
            s.state.advance(s.rows.stop - s.rows.start)
        logits = linear(self.output, self.norm(x).to(self.output.data.device)).cpu()
        cap, logits = self.spec.logit_cap, scaled(logits, self.spec.logit_scale)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _through(self, batch: Batch, cancelled: Callable[[], bool] | None) -> torch.Tensor:
        """The states after the last layer, [N, hidden] or those of the rows wanted alone."""
        x = scaled(embed(self.embedding, batch.tokens), self.spec.embedding_scale)
        through = []
        for rows in parts(len(batch.tokens)):
            part = batch.part(rows)
            through.append(Part(rows, part, RopeTables(part.positions)))
        for layer, device in zip(self.layers, self.devices, strict=True):
            if cancelled is not None and cancelled():
                raise Cancelled
            turn()
            if len(through) > 1:
                give_back_freed()
            x = x.to(device)
            if layer is self.layers[-1] and self._is_cut(batch):
                x = layer.of_wanted(x, batch, through)
            else:
                x = layer(x, batch.phase, through)
        return x

    def _is_cut(self, batch: Batch) -> bool:
        """Whether the last layer leaves tokens out. Of several sequences it would not be known whose they are."""
        return not self._whole and len(batch.segments) == 1 and 0 < len(batch.logit_rows) < len(batch.tokens)
