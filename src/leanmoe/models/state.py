"""What a sequence leaves behind in the network: for each layer its keys and values, or what it keeps instead."""

from collections.abc import Sequence
from typing import Protocol, Self

import torch

from leanmoe.errors import UsageError

KV_TYPES = {"f16": torch.float16, "f32": torch.float32}


class LayerState(Protocol):
    """What one layer keeps of one sequence."""

    @property
    def nbytes(self) -> int: ...

    def copy(self, length: int) -> Self:
        """One of the same size that holds the first `length` tokens as this does."""


class KVState:
    """The keys and values of one layer, [kv_heads, capacity, head_dim] each: any prefix of them stands alone."""

    def __init__(
        self, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._cache = torch.empty((2, kv_heads, capacity, head_dim), dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    def extend(self, start: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores k and v [T, kv_heads, head_dim] at positions start.. and returns all keys and values up to there.

        The returned views are [kv_heads, start + T, head_dim] in the cache's own type.
        """
        end = start + k.shape[0]
        cache = self._cache
        cache[0, :, start:end].copy_(k.transpose(0, 1))
        cache[1, :, start:end].copy_(v.transpose(0, 1))
        return cache[0, :, :end], cache[1, :, :end]

    def copy(self, length: int) -> "KVState":
        _, kv_heads, capacity, head_dim = self._cache.shape
        other = KVState(kv_heads, head_dim, capacity, self._cache.dtype, self._cache.device)
        other._cache[:, :, :length].copy_(self._cache[:, :, :length])
        return other


class SequenceState:
    """One sequence's state: `layers[i]` is what layer i keeps, with room for `capacity` tokens.

    `length` tokens are held. Memory is reserved at once and touched as the sequence grows.
    """

    def __init__(self, layers: Sequence[LayerState], capacity: int) -> None:
        self.layers = tuple(layers)
        self.capacity, self.length = capacity, 0

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def kv(self, layer: int) -> KVState:
        """The state of an attention layer."""
        state = self.layers[layer]
        assert isinstance(state, KVState)
        return state

    def reserve(self, tokens: int) -> None:
        """Checks that `tokens` more fit. Raises `UsageError` naming the context that would do."""
        if self.length + tokens > self.capacity:
            raise UsageError(
                f"the sequence needs {self.length + tokens} tokens of context but has {self.capacity}; "
                f"use --context {self.length + tokens} or more"
            )

    def truncate(self, length: int) -> int:
        """Forgets every token after the first `length`, or, where a layer cannot, more. Returns what is left."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a sequence of {self.length} tokens to {length}")
        self.length = length
        return length

    def copy(self) -> "SequenceState":
        """A sequence of its own that goes on from the same tokens."""
        other = SequenceState([layer.copy(self.length) for layer in self.layers], self.capacity)
        other.length = self.length
        return other
