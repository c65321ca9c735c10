"""The fused call for a group of experts: the heart of every layer."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_fixtures import expert_layout, expert_part, random_batch, random_slot, using
from leanmoe import kernels
from leanmoe.errors import UnsupportedError
from leanmoe.kernels import ExpertBatch, torch_reference
from leanmoe.kernels.types import activation
from leanmoe.pack.layout import ExpertLayout, Section

ISAS = kernels.available_isas()
TYPES = [
    ("Q4_K", "Q4_K", "Q6_K"),
    ("Q8_0", "Q4_1", "Q5_0"),
    ("F32", "BF16", "F16"),
    ("Q6_K", "Q8_0", "F32"),
    ("MXFP4", "IQ4_XS", "Q2_K"),
]
EXTRAS = ("gate_bias", "up_bias", "down_bias", "gate_scale", "down_scale")


def inputs(tokens: int, width: int, rng: np.random.Generator) -> torch.Tensor:
    # small enough that the activations are in their curved part
    return torch.from_numpy(rng.standard_normal((tokens, width)).astype(np.float32) * 0.05)


def run(layout: ExpertLayout, batch: ExpertBatch, x: torch.Tensor, act: str = "silu") -> torch.Tensor:
    out = torch.full((batch.token.shape[0], x.shape[1]), torch.nan)
    kernels.moe_ffn(layout, batch, x, out, act)
    return out


def composed(layout: ExpertLayout, batch: ExpertBatch, x: torch.Tensor, act: str) -> torch.Tensor:
    """The same from single products and torch's activations."""

    def product(slot: torch.Tensor, name: str, rows: torch.Tensor) -> torch.Tensor:
        y = kernels.linear(expert_part(layout, slot, name), rows.contiguous())
        if f"{name}_scale" in layout.sections:
            y = y * expert_part(layout, slot, f"{name}_scale").data.view(torch.float32)
        if f"{name}_bias" in layout.sections:
            y = y + expert_part(layout, slot, f"{name}_bias").data.view(torch.float32)
        return y

    out = torch.full((batch.token.shape[0], x.shape[1]), torch.nan)
    ends = list(itertools.accumulate(batch.counts))
    for slot, begin, end in zip(batch.slots, [0, *ends], ends, strict=False):
        rows = x[batch.token[begin:end].long()]
        hidden = torch_reference.glu(activation(act), product(slot, "gate", rows), product(slot, "up", rows))
        out[batch.dest[begin:end].long()] = product(slot, "down", hidden)
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("types", TYPES, ids="-".join)
@settings(max_examples=4, deadline=None)
@given(
    counts=st.lists(st.integers(0, 11), min_size=1, max_size=5),
    act=st.sampled_from(["silu", "gelu", "swiglu_oai"]),
    extras=st.sets(st.sampled_from(EXTRAS)),
    seed=st.integers(0, 2**32),
)
def test_one_call_is_its_products_in_turn(
    types: tuple[str, str, str], isa: str, counts: list[int], act: str, extras: set[str], seed: int
) -> None:
    """Every expert's output is what its own three matrices, biases and scales say."""
    rng = np.random.default_rng(seed)
    layout = expert_layout(types, 256, 512, tuple(sorted(extras)))
    batch = random_batch(layout, counts, 7, rng)
    x = inputs(7, 512, rng)
    with using(isa):
        got, want = run(layout, batch, x, act), composed(layout, batch, x, act)
    # The last bits of the activation differ from torch's, and may move a hidden value to the next 8-bit step.
    for row, reference in zip(got, want, strict=True):
        loose = 1e-5 if types[2] in ("F32",) else 4e-3
        assert (row - reference).abs().max() <= loose * reference.abs().max() + 1e-6


@pytest.mark.parametrize("act", ["silu", "gelu", "swiglu_oai"])
@pytest.mark.parametrize("isa", ISAS)
def test_activations_are_accurate_everywhere(act: str, isa: str) -> None:
    """Large, tiny and negative gates, against float64 formulas."""
    gates = torch.tensor(
        [-120.0, -20.0, -3.0, -1e-3, -0.0, 0.0, 1e-30, 1e-3, 0.5, 3.0, 6.9, 7.1, 20.0, 120.0]
    )
    layout = expert_layout(("F32", "F32", "F32"), 1, 1)
    slot = torch.zeros(layout.file_bytes, dtype=torch.uint8)
    for name in ("gate", "up", "down"):
        at = layout.sections[name].offset
        slot[at : at + 4] = torch.tensor([1.0]).view(torch.uint8)
    index = torch.arange(len(gates), dtype=torch.int32)
    with using(isa):
        got = run(layout, ExpertBatch([slot], [len(gates)], index, index), gates[:, None].contiguous(), act)
    g = gates.double()
    if act == "silu":
        want = g * torch.sigmoid(g) * g
    elif act == "gelu":
        want = torch.nn.functional.gelu(g, approximate="tanh") * g
    else:
        clamped = g.clamp(max=7)
        want = clamped * torch.sigmoid(1.702 * clamped) * (g.clamp(-7, 7) + 1)
    assert torch.allclose(got[:, 0].double(), want, rtol=2e-6, atol=1e-12 + 1e-30)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_bits_do_not_depend_on_the_grouping(types: tuple[str, str, str], isa: str) -> None:
    """Streamed output equals fully resident output only if an expert's result ignores the rest of its call."""
    rng = np.random.default_rng(3)
    layout = expert_layout(types, 512, 256, ("gate_bias", "down_bias"))
    counts = [1, 9, 0, 17, 3]
    batch = random_batch(layout, counts, 12, rng)
    x = inputs(12, 256, rng)
    with using(isa, threads=2):
        together = run(layout, batch, x)
    for threads in (1, 3):
        with using(isa, threads):
            assert torch.equal(run(layout, batch, x), together)
    with using(isa):
        out = torch.full_like(together, torch.nan)
        ends = list(itertools.accumulate(counts))
        for e in reversed(range(len(counts))):
            span = slice(ends[e] - counts[e], ends[e])
            one = ExpertBatch([batch.slots[e]], [counts[e]], batch.token[span], batch.dest[span])
            kernels.moe_ffn(layout, one, x, out)
        assert torch.equal(out, together)
        for i in range(ends[-1]):
            e = next(e for e, end in enumerate(ends) if i < end)
            row = x[batch.token[i] : batch.token[i] + 1].contiguous()
            zero = torch.zeros(1, dtype=torch.int32)
            alone = run(layout, ExpertBatch([batch.slots[e]], [1], zero, zero), row)
            assert torch.equal(alone[0], together[batch.dest[i]]), i


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("inner", "largest"), [(512, 90), (2048, 300)])
def test_bits_do_not_depend_on_who_computes_an_expert(inner: int, largest: int, isa: str) -> None:
    """A long prompt's experts are each computed by one thread, in parts if large, unless there are few of them."""
    rng = np.random.default_rng(6)
    layout = expert_layout(("Q4_K", "Q8_0", "Q6_K"), inner, 256, ("gate_bias", "down_bias"))
    counts = [largest, 1, 65, 30, largest - 6, 64, 0, largest, 40, largest]
    batch = random_batch(layout, counts, 350, rng)
    x = inputs(350, 256, rng)
    alone = torch.full((sum(counts), 256), torch.nan)
    ends = list(itertools.accumulate(counts))
    with using(isa, threads=2):
        for e, end in enumerate(ends):
            span = slice(end - counts[e], end)
            one = ExpertBatch([batch.slots[e]], [counts[e]], batch.token[span], batch.dest[span])
            kernels.moe_ffn(layout, one, x, alone)
    for threads in (1, 2, 3, 40):
        with using(isa, threads):
            assert torch.equal(run(layout, batch, x), alone)


def sums(
    layout: ExpertLayout,
    batch: ExpertBatch,
    x: torch.Tensor,
    weights: torch.Tensor,
    calls: list[int],
    onto: torch.Tensor,
) -> torch.Tensor:
    """Each token's weighted sum, in calls for so many experts each, of tokens that are rounded a few at a time."""
    tokens = kernels.expert_input(layout, len(x), x.device)
    for begin in range(0, len(x), 150):
        kernels.put_tokens(layout, x[begin : begin + 150], tokens[begin : begin + 150])
    out = onto.clone()
    ends = [0, *itertools.accumulate(batch.counts)]
    begin = 0
    for n in calls:
        span = slice(ends[begin], ends[begin + n])
        some = ExpertBatch(
            batch.slots[begin : begin + n],
            batch.counts[begin : begin + n],
            batch.token[span],
            batch.dest[span],
        )
        kernels.moe_ffn(layout, some, tokens, out, "silu", weights.view(-1))
        begin += n
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("types", "inner", "tokens"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), 256, 5),
        (("Q4_K", "Q8_0", "Q6_K"), 512, 400),
        (("Q4_0", "Q4_0", "F16"), 2048, 700),  # in several waves
        (("IQ2_XXS", "Q4_K", "Q4_K"), 256, 9),  # without a product of its own
    ],
    ids=str,
)
def test_sums_are_those_of_outputs_kept_apart(
    types: tuple[str, str, str], inner: int, tokens: int, isa: str
) -> None:
    """A prompt adds up what experts say as they come, a decode step keeps it: the bits must be the same."""
    rng = np.random.default_rng(8)
    layout = expert_layout(types, inner, 256, ("down_bias", "down_scale"))
    experts, k = 6, 3
    ids = torch.from_numpy(rng.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :k].copy())
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=experts).tolist()
    slots = [random_slot(layout, rng) for _ in range(experts)]
    batch = ExpertBatch(slots, counts, (order // k).int(), order.int())
    x, weights, onto = inputs(tokens, 256, rng), torch.rand(tokens, k), inputs(tokens, 256, rng)
    with using(isa, threads=2):
        want = kernels.weighted_sum(run(layout, batch, x).view(tokens, k, 256), weights, ids, onto)
    for threads, calls in ((1, [6]), (2, [6]), (3, [1, 4, 1]), (2, [2, 2, 2])):
        with using(isa, threads):
            assert torch.equal(sums(layout, batch, x, weights, calls, onto), want)


@pytest.mark.parametrize("types", [("Q4_K", "Q8_0", "Q6_K"), ("IQ2_XXS", "Q4_K", "Q4_K")], ids=str)
def test_room_for_tokens_is_not_left(types: tuple[str, str, str]) -> None:
    layout = expert_layout(types, 256, 256)
    room = kernels.expert_input(layout, 3, torch.device("cpu"))
    x, index = torch.zeros(3, 256), torch.zeros(1, dtype=torch.int32)
    batch = ExpertBatch([random_slot(layout, np.random.default_rng(0))], [1], index, index)
    kernels.put_tokens(layout, x, room)
    for bad in (x[:2], torch.zeros(3, 512), x.double()):
        with pytest.raises(ValueError, match=r"\bx\b"):
            kernels.put_tokens(layout, bad, room)
    for bad in (room[:2], room[:, :-4].contiguous(), room.view(torch.int16)):
        with pytest.raises(ValueError, match="room"):
            kernels.put_tokens(layout, x, bad)
    for bad in (room[:, :-4].contiguous(), room.view(torch.int16)):
        with pytest.raises(ValueError, match="x"):
            kernels.moe_ffn(layout, batch, bad, torch.zeros(1, 256))
    with pytest.raises(ValueError, match="outside"):
        kernels.moe_ffn(layout, dataclasses.replace(batch, token=index + 3), room, torch.zeros(1, 256))


def test_more_pairs_than_one_wave_of_scratch() -> None:
    """A long prompt must not need scratch in proportion to its length, nor change a bit."""
    rng = np.random.default_rng(4)
    layout = expert_layout(("Q8_0", "Q8_0", "Q8_0"), 32768, 32)
    batch = random_batch(layout, [200, 350], 64, rng)
    x = inputs(64, 32, rng)
    kernels.release_scratch()
    together = run(layout, batch, x)
    assert kernels.scratch_bytes() < 100 << 20
    out = torch.full_like(together, torch.nan)
    for begin in range(0, 550, 50):
        part = slice(begin, begin + 50)
        slot = batch.slots[0 if begin < 200 else 1]
        kernels.moe_ffn(layout, ExpertBatch([slot], [50], batch.token[part], batch.dest[part]), x, out)
    assert torch.equal(out, together)
    kernels.release_scratch()


@pytest.mark.parametrize(
    ("types", "extras"),
    [
        (("NVFP4", "NVFP4", "NVFP4"), ("gate_scale", "up_scale", "down_scale")),
        (("Q4_K", "IQ3_S", "Q4_K"), ("gate_bias", "up_bias", "down_bias")),
        (("IQ2_XXS", "IQ2_XXS", "Q2_K"), ()),
    ],
    ids=str,
)
def test_experts_of_rare_types(types: tuple[str, str, str], extras: tuple[str, ...]) -> None:
    """Slower, but right, and still independent of the grouping."""
    rng = np.random.default_rng(5)
    layout = expert_layout(types, 256, 256, extras)
    batch = random_batch(layout, [2, 0, 3], 4, rng)
    x = inputs(4, 256, rng)
    got = run(layout, batch, x)
    want = composed(layout, batch, x, "silu")
    assert ((got - want).abs().amax(1) <= 4e-3 * want.abs().amax(1)).all()
    one = ExpertBatch(batch.slots[2:], [1], batch.token[4:], torch.zeros(1, dtype=torch.int32))
    assert torch.equal(run(layout, one, x)[0], got[batch.dest[4]])


@pytest.mark.parametrize("act", ["silu", "gelu", "swiglu_oai"])
def test_torch_reference_computes_the_same(act: str) -> None:
    """What a GPU computes with; float weights, so that nothing is rounded on either side."""
    rng = np.random.default_rng(6)
    layout = expert_layout(("F32", "F32", "F32"), 48, 40, EXTRAS)
    batch = random_batch(layout, [2, 0, 5, 1], 6, rng)
    x = inputs(6, 40, rng)
    out = torch.full((8, 40), torch.nan)
    torch_reference.moe_ffn(layout, batch, x, out, act)
    torch.testing.assert_close(out, run(layout, batch, x, act), rtol=1e-4, atol=1e-5)


def test_an_empty_group_does_nothing() -> None:
    layout = expert_layout(("Q8_0", "Q8_0", "Q8_0"), 32, 32)
    none = torch.empty(0, dtype=torch.int32)
    out = torch.ones(2, 32)
    kernels.moe_ffn(layout, ExpertBatch([], [], none, none), torch.zeros(1, 32), out)
    slot = random_slot(layout, np.random.default_rng(0))
    kernels.moe_ffn(layout, ExpertBatch([slot], [0], none, none), torch.zeros(1, 32), out)
    assert torch.equal(out, torch.ones(2, 32))


def _changed(batch: ExpertBatch, **changes: object) -> ExpertBatch:
    return dataclasses.replace(batch, **changes)


BAD_BATCHES = {
    "a count too many": lambda b: _changed(b, counts=[2, 2]),
    "a negative count": lambda b: _changed(b, counts=[4, -1]),
    "fewer counts than slots": lambda b: _changed(b, counts=[3]),
    "a short slot": lambda b: _changed(b, slots=[b.slots[0], b.slots[1][:-4096]]),
    "a slot of another type": lambda b: _changed(b, slots=[b.slots[0], b.slots[1].view(torch.int8)]),
    "a slot with gaps": lambda b: _changed(b, slots=[b.slots[0], torch.cat([b.slots[1]] * 2)[::2]]),
    "a token beyond x": lambda b: _changed(b, token=torch.tensor([0, 4, 1], dtype=torch.int32)),
    "a negative token": lambda b: _changed(b, token=torch.tensor([0, -1, 1], dtype=torch.int32)),
    "a dest beyond out": lambda b: _changed(b, dest=torch.tensor([0, 1, 3], dtype=torch.int32)),
    "a negative dest": lambda b: _changed(b, dest=torch.tensor([0, 1, -3], dtype=torch.int32)),
    "long indices": lambda b: _changed(b, token=b.token.long()),
    "fewer dest than token": lambda b: _changed(b, dest=b.dest[:2]),
}


@pytest.mark.parametrize("types", [("Q8_0", "Q8_0", "Q8_0"), ("Q8_0", "NVFP4", "Q8_0")], ids=str)
@pytest.mark.parametrize("change", BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
def test_a_batch_that_does_not_fit_is_refused(change, types: tuple[str, str, str]) -> None:
    """Never a read or a write outside the buffers, in either implementation."""
    rng = np.random.default_rng(7)
    layout = expert_layout(types, 64, 64)
    batch = change(random_batch(layout, [2, 1], 4, rng))
    for room in (kernels, torch_reference):
        with pytest.raises((ValueError, UnsupportedError)):
            room.moe_ffn(layout, batch, torch.zeros(4, 64), torch.zeros(3, 64), "silu")


def test_a_row_written_twice_is_refused() -> None:
    """Two threads would race for it."""
    layout = expert_layout(("Q8_0", "Q8_0", "Q8_0"), 64, 64)
    batch = random_batch(layout, [2, 1], 4, np.random.default_rng(8))
    twice = _changed(batch, dest=torch.tensor([0, 1, 0], dtype=torch.int32))
    with pytest.raises(ValueError, match="twice"):
        kernels.moe_ffn(layout, twice, torch.zeros(4, 64), torch.zeros(3, 64))


def _with(experts: ExpertLayout, name: str, **changes: object) -> ExpertLayout:
    section = dataclasses.replace(experts.sections[name], **changes)
    return ExpertLayout({**experts.sections, name: section}, experts.file_bytes)


BAD_LAYOUTS = {
    "beyond the file": lambda a: _with(a, "down", offset=a.file_bytes - 64),
    "before the file": lambda a: _with(a, "up", offset=-64),
    "short": lambda a: _with(a, "gate", nbytes=a.sections["gate"].nbytes - 1),
    "shapes that do not fit": lambda a: _with(a, "down", shape=(32, 64)),
    "no down": lambda a: ExpertLayout({k: v for k, v in a.sections.items() if k != "down"}, a.file_bytes),
    "an unknown section": lambda a: ExpertLayout({**a.sections, "side": a.sections["up"]}, a.file_bytes),
    "a vector for a matrix": lambda a: _with(a, "gate", shape=(64 * 64,)),
    "a bias of the wrong size": lambda a: ExpertLayout(
        {**a.sections, "up_bias": Section(a.sections["down_bias"].qtype, (8,), 0, 32)}, a.file_bytes
    ),
}


@pytest.mark.parametrize("change", BAD_LAYOUTS.values(), ids=BAD_LAYOUTS.keys())
def test_a_layout_that_does_not_fit_is_refused(change) -> None:
    """A manifest is untrusted input: a section outside its file must never be read."""
    good = expert_layout(("Q8_0", "Q8_0", "Q8_0"), 64, 64, ("down_bias",))
    batch = random_batch(good, [1], 1, np.random.default_rng(9))
    for room in (kernels, torch_reference):
        with pytest.raises(ValueError, match=r"\w"):
            room.moe_ffn(change(good), batch, torch.zeros(1, 64), torch.zeros(1, 64), "silu")


def test_unknown_names_are_refused() -> None:
    layout = expert_layout(("Q8_0", "Q8_0", "Q8_0"), 64, 64)
    batch = random_batch(layout, [1], 1, np.random.default_rng(10))
    with pytest.raises(ValueError, match="tanhshrink"):
        kernels.moe_ffn(layout, batch, torch.zeros(1, 64), torch.zeros(1, 64), "tanhshrink")
    for room in (kernels, torch_reference):
        with pytest.raises(UnsupportedError, match="rows32"):
            room.moe_ffn(
                _with(layout, "up", layout="rows32"), batch, torch.zeros(1, 64), torch.zeros(1, 64), "silu"
            )


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_some_experts_of_one_token_are_those_of_a_batch(types: tuple[str, str, str], isa: str) -> None:
    rng = np.random.default_rng(5)
    layout = expert_layout(types, inner=256, width=512)
    slots = [random_slot(layout, rng) for _ in range(3)]
    x, places = inputs(1, 512, rng), [4, 0, 2]
    with using(isa):
        mine, batch = torch.full((5, 512), torch.nan), torch.full((5, 512), torch.nan)
        kernels.moe_some(layout, slots, places, x, mine)
        kernels.moe_ffn(layout, ExpertBatch.of_token(slots, places, x.device), x, batch)
    assert torch.equal(mine[places], batch[places])
    assert mine[[1, 3]].isnan().all()  # rows of other experts are left alone


@pytest.mark.parametrize(
    ("places", "rows", "tokens", "wanted"),
    [
        ([0], 2, 1, "one place"),
        ([0, 2], 2, 1, "dest index 2"),
        ([1, 1], 2, 1, "row 1 twice"),
        ([0, 1], 2, 2, "one token"),
    ],
)
def test_some_experts_that_do_not_fit_are_refused(
    places: list[int], rows: int, tokens: int, wanted: str
) -> None:
    rng = np.random.default_rng(6)
    layout = expert_layout(("Q4_K", "Q4_K", "Q6_K"), inner=256, width=512)
    slots = [random_slot(layout, rng) for _ in range(2)]
    with pytest.raises(ValueError, match=wanted):
        kernels.moe_some(layout, slots, places, inputs(tokens, 512, rng), torch.zeros(rows, 512))
    with pytest.raises(ValueError, match="a slot must be"):
        kernels.moe_some(layout, [slots[0][:-1]], [0], inputs(1, 512, rng), torch.zeros(1, 512))
