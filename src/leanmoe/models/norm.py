"""RMSNorm (Zhang and Sennrich 2019)."""

from dataclasses import dataclass

import torch

from leanmoe.kernels import rms_norm


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, which has the size of `weight`."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)
