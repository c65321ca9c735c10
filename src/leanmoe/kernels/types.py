"""What a product is given: one weight matrix, or a group of experts with their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch

from leanmoe.formats.quant_types import QuantType
from leanmoe.pack.layout import CANONICAL


def check_bytes(name: str, data: torch.Tensor, qtype: QuantType, rows: int, cols: int) -> None:
    """`data` must be exactly the bytes of `rows` rows of `cols` elements of this type."""
    if rows < 0 or cols <= 0 or cols % qtype.block:
        raise ValueError(f"{name}: {rows} x {cols} is not made of whole {qtype.name} blocks ({qtype.block})")
    wanted = rows * (cols // qtype.block) * qtype.block_bytes
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous() or data.numel() != wanted:
        raise ValueError(
            f"{name}: {rows} x {cols} {qtype.name} takes {wanted} bytes (uint8, 1-D), "
            f"not {tuple(data.shape)} {data.dtype}"
        )


@dataclass(frozen=True, slots=True)
class Weight:
    """A quantised matrix: `data` (uint8, 1-D, any device), rows and columns in `shape`.

    Its bytes are in the file's order, or in another `layout` (see `kernels.best_layout`). That they are as many as
    the shape wants is checked here, once: `ValueError` if not.
    """

    data: torch.Tensor
    qtype: QuantType
    shape: tuple[int, int]
    layout: str = CANONICAL

    def __post_init__(self) -> None:
        check_bytes("weight", self.data, self.qtype, *self.shape)


@dataclass(frozen=True, slots=True)
class ExpertBatch:
    """Experts of one layer with the tokens routed to them.

    `slots[e]` (uint8, 1-D) is the whole file of expert `e`, on the device. The first `counts[0]` entries of
    `token` and `dest` (int32, 1-D) belong to expert 0, and so on: expert `e` is applied to row `token[i]` of
    x and writes row `dest[i]` of the output. No row of the output may be named twice.
    """

    slots: Sequence[torch.Tensor]
    counts: Sequence[int]
    token: torch.Tensor
    dest: torch.Tensor

    @classmethod
    def of_token(cls, slots: Sequence[torch.Tensor], places: Sequence[int], device: torch.device) -> Self:
        """Each expert with token 0; that in slots[i] writes row places[i]."""
        dest = torch.tensor(places, dtype=torch.int32, device=device)
        return cls(slots, [1] * len(slots), torch.zeros_like(dest), dest)


@dataclass(frozen=True, slots=True)
class ResidentExperts:
    """The experts of one layer that are in memory, where none ever leaves it.

    `addresses` (int64 [E], on the CPU) is 0 for an expert that has not come yet; they point into `memory`. `hits`
    (int64 [1]) counts those that were found here, from the beginning.
    """

    addresses: torch.Tensor
    hits: torch.Tensor
    memory: torch.Tensor

    @classmethod
    def none(cls, experts: int, memory: torch.Tensor) -> "ResidentExperts":
        """Of this many none has come."""
        return cls(torch.zeros(experts, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), memory)


Gating = Literal["softmax", "sigmoid", "chosen_softmax", "sqrt_softplus"]

GATINGS: dict[Gating, int] = {"softmax": 0, "sigmoid": 1, "chosen_softmax": 2, "sqrt_softplus": 3}
"""The extension's numbers."""


class RoutingRule(Protocol):
    """How router logits become expert ids and weights. See `models.spec.RouterSpec`, which is one."""

    @property
    def top_k(self) -> int: ...
    @property
    def gating(self) -> Gating: ...
    @property
    def renormalise(self) -> bool: ...
    @property
    def scale(self) -> float: ...
    @property
    def groups(self) -> int: ...
    @property
    def groups_used(self) -> int: ...
    @property
    def group_score(self) -> Literal["max", "top2"]: ...


@dataclass(frozen=True, slots=True)
class Activation:
    """A gated activation. `code` is the extension's; `limit` and `alpha` belong to "swiglu_oai" alone."""

    code: int
    limit: float = 7.0
    alpha: float = 1.702

    @property
    def numbers(self) -> tuple[int, float, float]:
        """As the extension takes them."""
        return self.code, self.limit, self.alpha


ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(0),  # silu(gate) * up
    "gelu": Activation(1),  # gelu(gate), tanh form, * up
    "swiglu_oai": Activation(2),  # g = min(gate, 7), u = clamp(up, -7, 7): g * sigmoid(1.702 g) * (u + 1)
}


def activation(name: str) -> Activation:
    """The gated activation of that name. Raises `ValueError` for an unknown one."""
    found = ACTIVATIONS.get(name)
    if found is None:
        raise ValueError(f"activation {name!r} is unknown; known: {', '.join(ACTIVATIONS)}")
    return found
