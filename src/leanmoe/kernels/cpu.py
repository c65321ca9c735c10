"""Products on the CPU: checks, then the C++ extension; types without a product there go through exact
dequantisation.

The bits of an output element depend only on its weight row's bytes and its token's activations (for one
instruction set): not on the number of tokens, the grouping of experts or the number of threads.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from leanmoe.errors import UnsupportedError
from leanmoe.formats.quant_types import BY_ID, BY_NAME, QuantType
from leanmoe.kernels import _cpu
from leanmoe.kernels.checks import (
    check_convolution,
    check_delta,
    check_embed,
    check_layout,
    check_linear,
    check_linear_each,
    check_range,
    check_tensor,
)
from leanmoe.kernels.dequant_numpy import dequantize_rows
from leanmoe.kernels.tape import address_of, aside, empty
from leanmoe.kernels.types import Weight, check_bytes
from leanmoe.pack.layout import CANONICAL, ExpertLayout

_log = logging.getLogger(__name__)
PRODUCTS = frozenset(_cpu.product_types())
_ENCODED = frozenset(_cpu.encoded_types())
_CHUNK_BYTES = 8 << 20  # float32 rows that the slower path holds at a time
ROWS16 = "rows16"
LAYOUTS = {CANONICAL: 0, ROWS16: 1}
_TOGETHER = 16  # rows that rows16 interleaves
_F32 = BY_NAME["F32"]
_CPU = torch.device("cpu")


def linear(w: Weight, x: torch.Tensor) -> torch.Tensor:
    """x @ w.T: float32 [T, rows] for x float32 [T, cols]. Raises `ValueError` where they do not fit."""
    check_linear(w, x)
    out = empty((x.shape[0], w.shape[0]))
    if x.shape[0] == 0 or w.shape[0] == 0:
        return out
    if w.qtype.id in PRODUCTS:
        _linear(w, x, out)
    else:
        aside(lambda _: _linear_dequantized(w, x, out))
    return out


class LinearGroup:
    """Matrices that are multiplied with the same tokens, checked once. See `kernels.linear_group`."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = tuple(weights)  # keeps their bytes alive
        self._rows, self._cols = [w.shape[0] for w in weights], weights[0].shape[1]
        self._group = _cpu.Group(
            [(w.data.data_ptr(), w.data.numel(), w.qtype.id, LAYOUTS[w.layout], *w.shape) for w in weights]
        )

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x [T, cols] -> [T, rows] for each matrix. Raises `ValueError` where they do not fit."""
        check_tensor("x", x, torch.float32, 2, _CPU)
        tokens, cols = x.shape
        if cols != self._cols:
            raise ValueError(f"x has {cols} columns, the weights have {self._cols}")
        out = [empty((tokens, rows)) for rows in self._rows]
        if tokens:
            self._group.run(x.data_ptr(), tokens, [each.data_ptr() for each in out])
        return out


def has_product(w: Weight) -> bool:
    """Whether the extension multiplies weights of this type."""
    return w.qtype.id in PRODUCTS and w.shape[0] > 0


def linear_each(w: Weight, x: torch.Tensor) -> torch.Tensor:
    """Run i of the rows of w times part i of each token: float32 [T, count, rows] for x float32 [T, count, cols].

    `count` runs of equally many rows make up w. Raises `ValueError` where they do not fit.
    """
    rows = check_linear_each(w, x)
    tokens, count, cols = x.shape
    out = empty((tokens, count, rows))
    if w.qtype.id not in PRODUCTS:
        aside(lambda _: _linear_each_dequantized(w, x, out))
        return out
    if tokens:
        data = w.data
        matrices = data.data_ptr(), data.numel(), w.qtype.id, LAYOUTS[w.layout], rows, cols, count
        _cpu.linear_each(*matrices, x.data_ptr(), tokens, out.data_ptr())
    return out


def _linear_each_dequantized(w: Weight, x: torch.Tensor, out: torch.Tensor) -> None:
    _, count, cols = x.shape
    for i, data in enumerate(w.data.chunk(count)):
        out[:, i] = linear(Weight(data, w.qtype, (out.shape[2], cols)), x[:, i].contiguous())


def _linear(w: Weight, x: torch.Tensor, out: torch.Tensor) -> None:
    matrix = w.data.data_ptr(), w.data.numel(), w.qtype.id, LAYOUTS[w.layout], *w.shape
    _cpu.linear(*matrix, x.data_ptr(), x.shape[0], out.data_ptr())


def _linear_dequantized(w: Weight, x: torch.Tensor, out: torch.Tensor) -> None:
    _say_slow(w.qtype.name)
    rows, cols = w.shape
    row_bytes = w.qtype.row_bytes(cols)
    step = max(1, _CHUNK_BYTES // (4 * cols))
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        part = dequantize_rows(w.data[begin * row_bytes : end * row_bytes], w.qtype, end - begin, cols)
        product = torch.empty((x.shape[0], end - begin), dtype=torch.float32)
        _linear(Weight(part.view(-1).view(torch.uint8), _F32, (end - begin, cols)), x, product)
        out[:, begin:end] = product


@cache
def _say_slow(name: str) -> None:
    _log.warning(
        "%s has no product of its own: it is multiplied through dequantisation, which is slower", name
    )


def embed(w: Weight, ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids` (int64 [T]) of the table as float32 [T, cols]. Raises `ValueError` for a row outside it."""
    check_embed(w, ids)
    out = empty((ids.shape[0], w.shape[1]))
    if w.qtype.id in PRODUCTS:
        table = w.data.data_ptr(), w.qtype.id, LAYOUTS[w.layout], *w.shape
        _cpu.embed(*table, ids.data_ptr(), ids.shape[0], out.data_ptr())
        return out
    aside(lambda _: _embed_dequantized(w, ids, out))
    return out


def _embed_dequantized(w: Weight, ids: torch.Tensor, out: torch.Tensor) -> None:
    check_range("row", ids, w.shape[0])
    rows = w.data.view(w.shape[0], -1)[ids].view(-1)
    out.copy_(dequantize_rows(rows, w.qtype, ids.shape[0], w.shape[1]))


def best_layout(qtype: QuantType, rows: int) -> str:
    """The layout in which the instruction set in use multiplies `rows` rows of this type fastest."""
    fits = rows % _TOGETHER == 0 and _cpu.multiplies(qtype.id, LAYOUTS[ROWS16])
    return ROWS16 if fits else CANONICAL


def arrange(w: Weight, layout: str, *, alone: bool = False) -> Weight:
    """`w`, which is canonical, with its bytes rearranged in place. `alone` leaves the pool of threads to others.

    Raises `ValueError` for a type or a number of rows that does not have this layout.
    """
    if layout != CANONICAL:
        if w.layout != CANONICAL:
            raise ValueError(f"the weight is in layout {w.layout} already; canonical was wanted")
        _cpu.arrange(w.data.data_ptr(), w.data.numel(), w.qtype.id, LAYOUTS[layout], *w.shape, alone)
    return replace(w, layout=layout)


def arranged(layout: ExpertLayout) -> ExpertLayout:
    """The layout of an expert's bytes once an `Arrangement` has rearranged them."""
    check_layout(layout)
    sections = {
        name: replace(s, layout=best_layout(s.qtype, s.shape[0]) if len(s.shape) == 2 else CANONICAL)
        for name, s in layout.sections.items()
    }
    return ExpertLayout(sections, layout.file_bytes)


class Arrangement:
    """What brings an expert's bytes from its file's order into `layout`."""

    def __init__(self, layout: ExpertLayout) -> None:
        matrices = [
            (s.offset, s.qtype.id, LAYOUTS[s.layout], *s.shape)
            for s in layout.sections.values()
            if s.layout != CANONICAL
        ]
        self.native = _cpu.Arrangement(matrices, layout.file_bytes)

    def apply(self, slot: memoryview) -> None:
        """Rearranges an expert in place, on the calling thread alone. Raises `ValueError` for other bytes than its."""
        self.native.run(slot)


def dequantize(data: torch.Tensor, qtype: QuantType, shape: tuple[int, ...]) -> torch.Tensor:
    """The exact values of `data` as float32 of `shape` (its last dimension holds whole blocks)."""
    cols = shape[-1] if shape else 1
    rows = int(torch.Size(shape[:-1]).numel())
    check_bytes("data", data, qtype, rows, cols)
    if qtype.id not in PRODUCTS:
        return dequantize_rows(data, qtype, rows, cols).view(shape)
    out = torch.empty(shape, dtype=torch.float32)
    _cpu.dequantize(data.data_ptr(), qtype.id, rows, cols, out.data_ptr())
    return out


def quantize(x: torch.Tensor, qtype: QuantType) -> torch.Tensor:
    """Rows of floats [n, cols] as blocks: uint8 [n, row bytes]. Raises `ValueError` for numbers that do not fit."""
    check_tensor("x", x, torch.float32, 2, torch.device("cpu"))
    if qtype.id not in _ENCODED:
        names = ", ".join(quantized_types())
        raise UnsupportedError(f"nothing can be quantised to {qtype.name}; types with a quantiser: {names}")
    out = torch.empty((x.shape[0], qtype.row_bytes(x.shape[1])), dtype=torch.uint8)
    if not _cpu.encode(x.data_ptr(), qtype.id, x.shape[0], x.shape[1], out.data_ptr()):
        raise ValueError(f"a number is not finite, or too large for {qtype.name}")
    return out


def quantized_types() -> tuple[str, ...]:
    """The names of the types that `quantize` writes."""
    return tuple(BY_ID[number].name for number in sorted(_ENCODED))


def short_convolution(recent: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `kernels.short_convolution`. Raises `ValueError` for tensors that do not fit."""
    check_convolution(recent, x, weight)
    out, (tokens, channels) = empty(x.shape), x.shape
    place = address_of(recent)
    _cpu.convolve(
        place.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        tokens,
        channels,
        weight.shape[0],
    )
    return out


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
    """As `kernels.delta_rule`, one token after the other. Raises `ValueError` for tensors that do not fit."""
    check_delta(memory, q, k, v, beta, decay, out)
    (heads, key_dim, value_dim), place = memory.shape, address_of(memory)
    _cpu.delta_rule(
        place.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        beta.data_ptr(),
        decay.data_ptr(),
        out.data_ptr(),
        q.shape[0],
        q.shape[1],
        heads,
        key_dim,
        value_dim,
        grouped,
    )


def set_num_threads(n: int) -> None:
    """Uses `n` threads, the caller among them, for every product. Raises `ValueError` unless 1 to 1024."""
    _cpu.set_num_threads(n)


def get_num_threads() -> int:
    """Threads that share a product; at first the number of processors that this process may use."""
    return _cpu.get_num_threads()


def isa() -> str:
    """The instruction set in use: "portable", "avx2" or "avx512"."""
    return _cpu.isa()


def available_isas() -> list[str]:
    """The instruction sets that this processor has been seen to run, slowest first."""
    return _cpu.available_isas()


def compiled_isas() -> list[str]:
    """The instruction sets in this build, slowest first."""
    return _cpu.compiled_isas()


def set_isa(name: str) -> None:
    """Uses this instruction set from now on. Raises `UnsupportedError` where this processor cannot."""
    if name not in available_isas():
        raise UnsupportedError(
            f"instruction set {name!r} cannot be used; this processor has {available_isas()}"
        )
    _cpu.set_isa(name)


def scratch_bytes() -> int:
    """Bytes of scratch that the products hold. They grow to what the largest call needed, and stay."""
    return _cpu.scratch_bytes()


def release_scratch() -> None:
    """Frees the scratch; the next call allocates what it needs."""
    _cpu.release_scratch()
