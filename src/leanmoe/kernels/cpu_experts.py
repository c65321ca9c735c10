"""Whole experts on the CPU: checks, then the C++ extension; types without a product there expert by expert.

What `cpu` says of an output's bits holds here too.
"""

from collections.abc import Sequence

import torch

from leanmoe.errors import UnsupportedError
from leanmoe.kernels import _cpu
from leanmoe.kernels.checks import (
    check_batch,
    check_indices,
    check_layout,
    check_one_token,
    check_slots,
    check_tensor,
    check_token,
)
from leanmoe.kernels.cpu import LAYOUTS, PRODUCTS, linear
from leanmoe.kernels.tape import empty, recording
from leanmoe.kernels.torch_reference import deliver, pairs_by_expert
from leanmoe.kernels.types import Activation, ExpertBatch, ResidentExperts, Weight, activation
from leanmoe.pack.layout import ExpertLayout, Section

_CPU = torch.device("cpu")
_PAIRS = 256  # tokens of an expert that the slower path takes at a time

# Layouts are few and live as long as their pack; the kept reference makes the id a safe key.
_plans: dict[int, tuple[ExpertLayout, "_cpu.Plan | None", int, int]] = {}
_MAX_PLANS = 4096


def moe_ffn(
    layout: ExpertLayout,
    batch: ExpertBatch,
    x: torch.Tensor,
    out: torch.Tensor,
    name: str = "silu",
    weights: torch.Tensor | None = None,
) -> None:
    """As `kernels.moe_ffn`, all experts in one call.

    Raises `ValueError` for a batch that does not fit, `UnsupportedError` for an unknown section layout.
    """
    act = activation(name)
    _, plan, inner, width = _plans.get(id(layout)) or _make_plan(layout)
    rounded = 0 if plan is None or x.dtype != torch.uint8 else plan.rounded_bytes()
    check_batch(layout, width, batch, x, out, weights, rounded)
    if plan is None:
        _ffn_dequantized(layout, inner, batch, x, out, act, weights)
        return
    plan.run(
        [slot.data_ptr() for slot in batch.slots],
        list(batch.counts),
        batch.token.data_ptr(),
        batch.dest.data_ptr(),
        batch.token.shape[0],
        0 if rounded else x.data_ptr(),
        x.data_ptr() if rounded else 0,
        x.shape[0],
        0 if weights is None else weights.data_ptr(),
        len(out if weights is None else weights),
        out.data_ptr(),
        *act.numbers,
    )


def moe_some(
    layout: ExpertLayout,
    slots: Sequence[torch.Tensor],
    places: Sequence[int],
    x: torch.Tensor,
    out: torch.Tensor,
    name: str = "silu",
) -> None:
    """As `kernels.moe_some`; raises as `moe_ffn` does. In few steps: under a limit decoding calls it in every layer."""
    _, plan, _, width = _plans.get(id(layout)) or _make_plan(layout)
    if plan is None:
        moe_ffn(layout, ExpertBatch.of_token(slots, places, x.device), x, out, name)
        return
    check_one_token(x, out, width)
    check_slots(layout, slots, x.device)
    pointers = [slot.data_ptr() for slot in slots]
    plan.run_some(pointers, places, x.data_ptr(), out.data_ptr(), len(out), *activation(name).numbers)


def expert_input(layout: ExpertLayout, tokens: int) -> torch.Tensor:
    """As `kernels.expert_input`: uint8, or float32 for types without a product of their own."""
    _, plan, _, width = _plans.get(id(layout)) or _make_plan(layout)
    columns, dtype = _input_form(plan, width)
    return empty((tokens, columns), dtype)


def put_tokens(layout: ExpertLayout, x: torch.Tensor, room: torch.Tensor) -> None:
    """As `kernels.put_tokens`. Raises `ValueError` for tensors that do not fit."""
    _, plan, _, width = _plans.get(id(layout)) or _make_plan(layout)
    columns, dtype = _input_form(plan, width)
    check_tensor("x", x, torch.float32, 2, _CPU)
    check_tensor("room", room, dtype, 2, _CPU)
    if x.shape[1] != width or room.shape != (len(x), columns):
        raise ValueError(
            f"x {tuple(x.shape)} and room {tuple(room.shape)} are not of tokens for experts of width {width}"
        )
    if plan is None:
        room.copy_(x)
    else:
        plan.round(x.data_ptr(), len(x), room.data_ptr())


def _input_form(plan: "_cpu.Plan | None", width: int) -> tuple[int, torch.dtype]:
    """The columns and the type of an `expert_input`."""
    return (width, torch.float32) if plan is None else (plan.rounded_bytes(), torch.uint8)


def moe_token(
    layout: ExpertLayout,
    experts: ResidentExperts,
    ids: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    name: str = "silu",
) -> torch.Tensor | None:
    """out[j] = the expert ids[0, j] applied to x, as `moe_ffn` does, if all of them are in memory.

    ids [1, k], x [1, D], out [k, D]. Returns whether it did, as a tensor for `aside` (int64, one number, 0 or 1);
    None if it never can, for types without a product of their own. Raises `ValueError` for tensors that do not fit.
    """
    _, plan, _, width = _plans.get(id(layout)) or _make_plan(layout)
    if plan is None:
        return None
    check_token(ids, x, out, width)
    if (tape := recording()) is not None:
        tape.keep(plan, experts)
    done = empty((1,), torch.int64, lasting=True)
    plan.run_resident(
        experts.addresses.data_ptr(),
        experts.addresses.numel(),
        ids.data_ptr(),
        ids.numel(),
        x.data_ptr(),
        out.data_ptr(),
        *activation(name).numbers,
        experts.hits.data_ptr(),
        done.data_ptr(),
    )
    return done


def _make_plan(layout: ExpertLayout) -> tuple[ExpertLayout, "_cpu.Plan | None", int, int]:
    inner, width = check_layout(layout)
    gate, up, down = (_spec(layout, name) for name in ("gate", "up", "down"))
    fast = all(layout.sections[name].qtype.id in PRODUCTS for name in ("gate", "up", "down"))
    plan = _cpu.Plan(gate, up, down, layout.file_bytes) if fast else None
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[id(layout)] = known = (layout, plan, inner, width)
    return known


def _spec(layout: ExpertLayout, name: str) -> list[int]:
    section = layout.sections[name]
    if section.layout not in LAYOUTS:
        raise UnsupportedError(f"section layout {section.layout!r} is unknown; known: {', '.join(LAYOUTS)}")
    extras = [layout.sections.get(f"{name}_{extra}") for extra in ("bias", "scale")]
    offsets = [-1 if extra is None else extra.offset for extra in extras]
    return [section.qtype.id, LAYOUTS[section.layout], *section.shape, section.offset, *offsets]


def _ffn_dequantized(
    layout: ExpertLayout,
    inner: int,
    batch: ExpertBatch,
    x: torch.Tensor,
    out: torch.Tensor,
    act: Activation,
    weights: torch.Tensor | None,
) -> None:
    """The same as one fused call, expert by expert and product by product, for types without a product."""
    check_indices(batch, x.shape[0], len(out if weights is None else weights))
    for slot, tokens, dest in pairs_by_expert(batch, _PAIRS):
        rows = x[tokens]
        gate = _expert_product(layout, slot, "gate", rows)
        up = _expert_product(layout, slot, "up", rows)
        _cpu.glu(*act.numbers, gate.data_ptr(), up.data_ptr(), gate.data_ptr(), len(rows), inner)
        deliver(_expert_product(layout, slot, "down", gate), tokens, dest, out, weights)


def _expert_product(layout: ExpertLayout, slot: torch.Tensor, name: str, x: torch.Tensor) -> torch.Tensor:
    section = layout.sections[name]
    y = linear(Weight(_section_bytes(slot, section), section.qtype, (section.shape[0], section.shape[1])), x)
    if scale := layout.sections.get(f"{name}_scale"):
        y *= _section_bytes(slot, scale).clone().view(torch.float32)
    if bias := layout.sections.get(f"{name}_bias"):
        y += _section_bytes(slot, bias).clone().view(torch.float32)
    return y


def _section_bytes(slot: torch.Tensor, section: Section) -> torch.Tensor:
    return slot[section.offset : section.offset + section.nbytes]
