"""What a sequence leaves behind in the network: its KV cache."""

import torch

from leanmoe.errors import UsageError
from leanmoe.models.spec import ModelSpec

KV_TYPES = {"f16": torch.float16, "f32": torch.float32}


class SequenceState:
    """The keys and values of one sequence, for every layer, with room for `capacity` tokens.

    `length` tokens are held. Memory is reserved at once and touched as the sequence grows. Each layer's
    keys and values are [kv_heads, capacity, head_dim] on that layer's device.
    """

    def __init__(
        self, spec: ModelSpec, capacity: int, dtype: torch.dtype, devices: list[torch.device]
    ) -> None:
        self.capacity, self.length = capacity, 0
        a = spec.attention
        shape = (2, a.kv_heads, capacity, a.head_dim)
        self._layers = [torch.empty(shape, dtype=dtype, device=device) for device in devices]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._layers)

    def extend(
        self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores k and v [T, kv_heads, head_dim] at positions start.. and returns all keys and values up to there.

        The returned views are [kv_heads, start + T, head_dim] in the cache's own type.
        """
        end = start + k.shape[0]
        cache = self._layers[layer]
        cache[0, :, start:end].copy_(k.transpose(0, 1))
        cache[1, :, start:end].copy_(v.transpose(0, 1))
        return cache[0, :, :end], cache[1, :, :end]

    def reserve(self, tokens: int) -> None:
        """Checks that `tokens` more fit. Raises `UsageError` naming the context that would do."""
        if self.length + tokens > self.capacity:
            raise UsageError(
                f"the sequence needs {self.length + tokens} tokens of context but has {self.capacity}; "
                f"use --context {self.length + tokens} or more"
            )

    def truncate(self, length: int) -> None:
        """Forgets every token after the first `length`."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a sequence of {self.length} tokens to {length}")
        self.length = length
