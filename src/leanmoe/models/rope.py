"""Rotary position embedding, with linear and YaRN scaling (Su et al. 2021; Peng et al. 2023)."""

import math

import torch

from leanmoe.kernels import angles, turn_heads
from leanmoe.models.norm import RMSNorm
from leanmoe.models.spec import RopeSpec


class Rope:
    """Rotates the first `rotary_dim` dimensions of every head by its token's position.

    `factors` [rotary_dim / 2] divides the frequencies (`rope_freqs.weight`, as Llama 3 uses it).
    """

    def __init__(self, spec: RopeSpec, factors: torch.Tensor | None = None) -> None:
        half = spec.rotary_dim // 2
        freq = spec.base ** (-torch.arange(half, dtype=torch.float64) * 2 / spec.rotary_dim)
        if factors is not None:
            freq = freq / factors.to("cpu", torch.float64)
        if spec.scaling == "linear":
            freq = freq / spec.factor
        elif spec.scaling == "yarn":
            ramp = _yarn_extrapolation(spec)
            freq = freq / spec.factor * (1 - ramp) + freq * ramp
        self._freq = freq
        self.spec = spec

    def tables(self, positions: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, rotary_dim / 2] for token positions [T]."""
        cos, sin = angles(self._freq, positions.cpu(), self.spec.magnitude)
        return cos.to(device), sin.to(device)

    def apply(
        self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], norm: RMSNorm | None = None
    ) -> torch.Tensor:
        """x [T, heads, head_dim] rotated, after the `norm` of each head if there is one."""
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return turn_heads(x, *tables, apart=self.spec.style == "neox", norm=weight, eps=eps)


class RopeTables:
    """The tables for the positions [T] of one forward pass, made once for each distinct rope and device."""

    def __init__(self, positions: torch.Tensor) -> None:
        self._positions = positions
        self._made: dict[tuple[RopeSpec, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, rope: Rope, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, rotary_dim / 2] on `device`. Ropes of one model with equal specs share tables."""
        key = rope.spec, device
        if key not in self._made:
            self._made[key] = rope.tables(self._positions, device)
        return self._made[key]


def _yarn_extrapolation(spec: RopeSpec) -> torch.Tensor:
    """Per frequency pair, 1 where the original frequency is kept and 0 where it is divided by the factor."""

    def pair(turns: float) -> float:
        """The pair (a fraction) whose frequency turns that often in the original context."""
        wavelength = spec.original_context / (2 * math.pi * turns)
        return spec.rotary_dim * math.log(wavelength) / (2 * math.log(spec.base))

    low, high = pair(spec.yarn.fast), pair(spec.yarn.slow)
    if spec.yarn.whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(0.0, low), min(spec.rotary_dim - 1.0, high)
    i = torch.arange(spec.rotary_dim // 2, dtype=torch.float64)
    return 1 - ((i - low) / max(0.001, high - low)).clamp(0, 1)
