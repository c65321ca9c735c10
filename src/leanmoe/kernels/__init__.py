"""Products straight from quantised blocks: in C++ for tensors on the CPU, in torch for those elsewhere.

All tensors are contiguous, activations and results float32. A call that does not fit raises `ValueError`.
"""

from collections.abc import Callable, Sequence

import torch

from leanmoe.formats.quant_types import QuantType
from leanmoe.kernels import cpu, cpu_experts, cpu_step, torch_delta, torch_reference, torch_step, types
from leanmoe.kernels.cpu import (
    Arrangement,
    arrange,
    arranged,
    available_isas,
    best_layout,
    compiled_isas,
    get_num_threads,
    isa,
    quantize,
    quantized_types,
    release_scratch,
    scratch_bytes,
    set_isa,
    set_num_threads,
)
from leanmoe.kernels.cpu_experts import moe_token
from leanmoe.kernels.tape import Tape, addresses, aside, empty, recording, turn, working_in
from leanmoe.kernels.types import ExpertBatch, ResidentExperts, RoutingRule, Weight
from leanmoe.kernels.workspace import Workspace, give_back_freed
from leanmoe.pack.layout import ExpertLayout

__all__ = [
    "Arrangement",
    "ExpertBatch",
    "ResidentExperts",
    "Tape",
    "Weight",
    "Workspace",
    "add",
    "addresses",
    "angles",
    "arrange",
    "arranged",
    "aside",
    "available_isas",
    "best_layout",
    "columns",
    "compiled_isas",
    "contiguous",
    "decays",
    "delta_rule",
    "dequantize",
    "embed",
    "empty",
    "expert_input",
    "get_num_threads",
    "give_back_freed",
    "glu",
    "isa",
    "largest",
    "linear",
    "linear_each",
    "linear_group",
    "moe_ffn",
    "moe_some",
    "moe_token",
    "put_tokens",
    "quantize",
    "quantized_types",
    "recording",
    "release_scratch",
    "rms_norm",
    "route",
    "scaled",
    "scratch_bytes",
    "set_isa",
    "set_num_threads",
    "short_convolution",
    "sigmoid_gate",
    "turn",
    "turn_heads",
    "unit",
    "weighted_sum",
    "working_in",
]


def linear(w: Weight, x: torch.Tensor) -> torch.Tensor:
    """x @ w.T: float32 [T, rows] for x float32 [T, cols]."""
    return cpu.linear(w, x) if w.data.device.type == "cpu" else torch_reference.linear(w, x)


def linear_group(weights: Sequence[Weight]) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """`linear` with several matrices of as many columns, for the same x: in one call where that is quicker."""
    if all(w.data.is_cpu and cpu.has_product(w) for w in weights):
        return cpu.LinearGroup(weights)
    return lambda x: [linear(w, x) for w in weights]


def linear_each(w: Weight, x: torch.Tensor) -> torch.Tensor:
    """Run i of the rows of w times part i of each token: float32 [T, count, rows] for x float32 [T, count, cols].

    `count` matrices of equally many rows, one after the other, make up w. A product's bits are those of `linear`.
    """
    return cpu.linear_each(w, x) if w.data.device.type == "cpu" else torch_reference.linear_each(w, x)


def embed(w: Weight, ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids` (int64 [T]) of the table `w`, dequantised: float32 [T, cols]."""
    return cpu.embed(w, ids) if w.data.device.type == "cpu" else torch_reference.embed(w, ids)


def dequantize(data: torch.Tensor, qtype: QuantType, shape: tuple[int, ...]) -> torch.Tensor:
    """The exact values of the blocks in `data` (uint8, 1-D) as float32 of `shape`."""
    if data.device.type == "cpu":
        return cpu.dequantize(data, qtype, shape)
    return torch_reference.dequantize(data, qtype, shape)


def short_convolution(recent: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu of the causal convolution of each channel by itself: x [T, channels] -> [T, channels], float32.

    `weight` [taps, channels] has the tap for the token itself last. `recent` [taps - 1, channels] holds the inputs
    before x, and afterwards those before the next token.
    """
    run = cpu.short_convolution if x.device.type == "cpu" else torch_delta.short_convolution
    return run(recent, x, weight)


def delta_rule(
    memory: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    out: torch.Tensor,
    *,
    grouped: bool,
) -> None:
    """The gated delta rule over T tokens of one sequence, for each head with its memory S [key_dim, value_dim]:

    `S <- e^decay S; d = beta (v - S^T k); S <- S + k d^T; out = S^T q` (Yang, Kautz and Hatamizadeh 2024).

    memory [heads, key_dim, value_dim] is updated; q, k [T, key_heads, key_dim]; v, out [T, heads, value_dim];
    beta, decay [T, heads], decay at most 0; all float32. Head h reads key head h // (heads / key_heads) if
    `grouped`, else h % key_heads. On the CPU the bits do not depend on how tokens are divided between calls.
    """
    run = cpu.delta_rule if memory.device.type == "cpu" else torch_delta.delta_rule
    run(memory, q, k, v, beta, decay, out, grouped=grouped)


def moe_ffn(
    layout: ExpertLayout,
    batch: ExpertBatch,
    x: torch.Tensor,
    out: torch.Tensor,
    activation: str = "silu",
    weights: torch.Tensor | None = None,
) -> None:
    """out[dest[i]] = down(act(gate x[token[i]]) * up x[token[i]]) for each pair i of the batch.

    With `weights` [P] instead out[token[i]] += weights[dest[i]] * down(...), in the order of the pairs: what
    `weighted_sum` makes of the former, if an expert's pairs come before those of every later one, in this call and
    those after it.

    `activation` is "silu", "gelu" (tanh form) or "swiglu_oai" (clamped; gpt-oss). x is [T, D], or with the same bits an
    `expert_input` of T tokens; out is [R, D] or [T, D]. Biases and scales of the layout are applied to their products.
    On the CPU the bits of down(...) depend only on the expert's bytes and on x[token[i]].
    """
    run = cpu_experts.moe_ffn if x.device.type == "cpu" else torch_reference.moe_ffn
    run(layout, batch, x, out, activation, weights)


def moe_some(
    layout: ExpertLayout,
    slots: Sequence[torch.Tensor],
    places: Sequence[int],
    x: torch.Tensor,
    out: torch.Tensor,
    activation: str = "silu",
) -> None:
    """out[places[i]] = the expert in slots[i] applied to the one token x [1, D], as `moe_ffn` does; out is [R, D]."""
    if x.is_cpu:
        cpu_experts.moe_some(layout, slots, places, x, out, activation)
    else:
        moe_ffn(layout, ExpertBatch.of_token(slots, places, x.device), x, out, activation)


def expert_input(layout: ExpertLayout, tokens: int, device: torch.device) -> torch.Tensor:
    """Room for so many tokens as the experts of a layout multiply them, which on the CPU is rounded: [tokens, ...]."""
    if device.type == "cpu":
        return cpu_experts.expert_input(layout, tokens)
    return torch.empty((tokens, layout.sections["down"].shape[0]), device=device)


def put_tokens(layout: ExpertLayout, x: torch.Tensor, room: torch.Tensor) -> None:
    """Tokens x [N, D] into rows `room` [N, ...] of an `expert_input`."""
    if x.is_cpu:
        cpu_experts.put_tokens(layout, x, room)
    else:
        room.copy_(x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, which has the size of `weight`."""
    run = cpu_step.rms_norm if x.is_cpu else torch_step.rms_norm
    return run(x, weight, eps)


def turn_heads(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    apart: bool,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """x [T, heads, dim], its pairs of dimensions turned by the angles of cos, sin [T, 1, half], as float32.

    Pair i is i and i + half if `apart`, else 2 i and 2 i + 1; dimensions beyond 2 half stay. With `norm` [dim] each
    head is first normed, as `rms_norm` does.
    """
    run = cpu_step.turn_heads if x.is_cpu else torch_step.turn_heads
    return run(x, cos, sin, apart=apart, norm=norm, eps=eps)


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, rule: RoutingRule
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Router logits [N, E] -> expert ids [N, k], best first, their weights [N, k], and chances [N, E].

    `bias` [E] takes part in the choice alone. The chances, 0 to 1, rank all experts as the choice did.
    """
    run = cpu_step.route if logits.is_cpu else torch_step.route
    return run(logits, bias, rule)


def largest(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of x [n], largest first, and their places (int64); of equals the earlier comes first."""
    if x.is_cpu and count < x.numel():
        return cpu_step.largest(x, count)
    values, places = x.sort(descending=True, stable=True)
    return values[:count], places[:count]


def weighted_sum(
    rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, onto: torch.Tensor | None = None
) -> torch.Tensor:
    """rows [N, k, D], weights [N, k] -> [N, D], added onto `onto` [N, D] or zeros, in the order of each token's ids
    [N, k], which differ."""
    run = cpu_step.weighted_sum if rows.is_cpu else torch_step.weighted_sum
    return run(rows, weights, ids, onto)


def add(
    x: torch.Tensor, y: torch.Tensor, scale: float = 1.0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x + scale * y: x [N, D], y [N, D] or [D]. `out`, which may be x or y, takes it."""
    return cpu_step.add(x, y, scale, out) if x.is_cpu else torch.add(x, y, alpha=scale, out=out)


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x * factor, for x [N, D]; x itself where the factor is 1."""
    if factor == 1.0:
        return x
    return cpu_step.scaled(x, factor) if x.is_cpu else x * factor


def glu(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up, [N, F] each, with the activations of `moe_ffn`."""
    if gate.is_cpu:
        return cpu_step.glu(gate, up, activation)
    return torch_reference.glu(types.activation(activation), gate, up)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate): x [N, D], gate [N, D], or [N, 1] for whole rows."""
    return cpu_step.sigmoid_gate(x, gate) if x.is_cpu else x * gate.sigmoid()


def angles(
    frequencies: torch.Tensor, positions: torch.Tensor, magnitude: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, 1, half] of positions (int64 [T]) times frequencies (float64 [half]), times `magnitude`."""
    run = cpu_step.angles if frequencies.is_cpu else torch_step.angles
    return run(frequencies, positions, magnitude)


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """x itself if its numbers lie one after the other, else a copy of which they do."""
    return cpu_step.contiguous(x) if x.is_cpu else x.contiguous()


def columns(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of parts [N, heads, D] (each with its own heads and D) beside each other: [N, sum of heads * D]."""
    if parts[0].is_cpu:
        return cpu_step.columns(parts)
    return torch.cat([part.flatten(1) for part in parts], dim=-1)


def decays(
    beta: torch.Tensor, alpha: torch.Tensor, step: torch.Tensor, rate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `delta_rule` takes: sigmoid(beta) and rate * softplus(alpha + step); beta, alpha [N, H], step, rate [H]."""
    if beta.is_cpu:
        return cpu_step.decays(beta, alpha, step, rate)
    return beta.sigmoid(), torch.nn.functional.softplus(alpha + step).mul_(rate)


def unit(x: torch.Tensor, eps: float, scale: float = 1.0) -> torch.Tensor:
    """`x * scale / sqrt(sum(x^2) + eps)` over the last dimension."""
    if x.is_cpu:
        return cpu_step.unit(x, eps, scale)
    return x * x.square().sum(-1, keepdim=True).add_(eps).rsqrt_().mul_(scale)
