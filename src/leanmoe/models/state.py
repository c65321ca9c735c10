"""What a sequence leaves behind in the network: for each layer its keys and values, or what it keeps instead."""

from collections.abc import Sequence
from typing import Protocol, Self

import torch

from leanmoe.errors import UsageError
from leanmoe.kernels import addresses

KV_TYPES = {"f16": torch.float16, "f32": torch.float32}


class LayerState(Protocol):
    """What one layer keeps of one sequence."""

    @property
    def nbytes(self) -> int: ...

    @property
    def memories(self) -> Sequence[torch.Tensor]:
        """Its tensors, which stay where they are."""

    def copy(self, length: int) -> Self:
        """One of the same size that holds the first `length` tokens as this does."""


class KVState:
    """The keys and values of one layer, [kv_heads, capacity, head_dim] each: any prefix of them stands alone.

    `cache` [2, kv_heads, capacity, head_dim] holds both.
    """

    def __init__(
        self, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.cache = torch.empty((2, kv_heads, capacity, head_dim), dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    @property
    def memories(self) -> Sequence[torch.Tensor]:
        return (self.cache,)

    def extend(self, start: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores k and v [T, kv_heads, head_dim] at positions start.. and returns all keys and values up to there.

        The returned views are [kv_heads, start + T, head_dim] in the cache's own type.
        """
        end = start + k.shape[0]
        cache = self.cache
        cache[0, :, start:end].copy_(k.transpose(0, 1))
        cache[1, :, start:end].copy_(v.transpose(0, 1))
        return cache[0, :, :end], cache[1, :, :end]

    def copy(self, length: int) -> "KVState":
        _, kv_heads, capacity, head_dim = self.cache.shape
        other = KVState(kv_heads, head_dim, capacity, self.cache.dtype, self.cache.device)
        other.cache[:, :, :length].copy_(self.cache[:, :, :length])
        return other


class RecurrentState:
    """A layer's memory of all tokens so far, float32, and a copy of it as it was at the last checkpoint.

    `recent` holds the last inputs of the layer's convolution, `memory` everything else; both begin as zeros. No
    prefix can be had from them.
    """

    def __init__(self, recent: torch.Tensor, memory: torch.Tensor) -> None:
        self.recent, self.memory = recent, memory
        self._saved = torch.empty_like(recent), torch.empty_like(memory)

    @property
    def nbytes(self) -> int:
        return 2 * (self.recent.nbytes + self.memory.nbytes)

    @property
    def memories(self) -> Sequence[torch.Tensor]:
        return self.recent, self.memory

    def save(self) -> None:
        for saved, now in zip(self._saved, (self.recent, self.memory), strict=True):
            saved.copy_(now)

    def restore(self) -> None:
        for saved, now in zip(self._saved, (self.recent, self.memory), strict=True):
            now.copy_(saved)

    def clear(self) -> None:
        self.recent.zero_()
        self.memory.zero_()

    def copy(self, length: int) -> "RecurrentState":
        return RecurrentState(self.recent.clone(), self.memory.clone())


class LatentState:
    """What latent attention keeps in one layer: an entry of `width` numbers for each token. Any prefix stands alone.

    `cache` [1, 1, capacity, width] is that of one key head whose keys are its values.
    """

    def __init__(self, width: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.cache = torch.empty((1, 1, capacity, width), dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    @property
    def memories(self) -> Sequence[torch.Tensor]:
        return (self.cache,)

    def extend(self, start: int, entries: torch.Tensor) -> torch.Tensor:
        """Stores entries [T, width] at positions start.. and returns all up to there, [start + T, width], a view."""
        end = start + len(entries)
        self.cache[0, 0, start:end].copy_(entries)
        return self.cache[0, 0, :end]

    def copy(self, length: int) -> "LatentState":
        _, _, capacity, width = self.cache.shape
        other = LatentState(width, capacity, self.cache.dtype, self.cache.device)
        other.cache[:, :, :length].copy_(self.cache[:, :, :length])
        return other


class SequenceState:
    """One sequence's state: `layers[i]` is what layer i keeps, with room for `capacity` tokens.

    `length` tokens are held. Memory is reserved at once and touched as the sequence grows. A sequence whose layers
    all keep something for each token can be cut anywhere; one with a recurrent layer only where it has its
    checkpoint, which is taken at the length `mark` as the sequence passes it.
    """

    def __init__(self, layers: Sequence[LayerState], capacity: int) -> None:
        self.layers = tuple(layers)
        self.capacity, self.length = capacity, 0
        self.mark: int | None = None
        self._recurrent = [layer for layer in self.layers if isinstance(layer, RecurrentState)]
        self._checkpoint: int | None = None
        self.memories = tuple(each for layer in self.layers for each in layer.memories)
        """The tensors of all layers, which stay where they are."""
        self.addresses = addresses(self.memories)
        self.form = tuple((each.shape, each.dtype) for each in self.memories)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def kv(self, layer: int) -> KVState:
        """The state of an attention layer."""
        state = self.layers[layer]
        assert isinstance(state, KVState)
        return state

    def recurrent(self, layer: int) -> RecurrentState:
        """The state of a recurrent layer."""
        state = self.layers[layer]
        assert isinstance(state, RecurrentState)
        return state

    def advance(self, tokens: int) -> None:
        """Every layer has taken `tokens` more, and saved what it kept at `mark` if they reached it."""
        if self.mark is not None and self.length < self.mark <= self.length + tokens:
            self._checkpoint, self.mark = self.mark, None
        self.length += tokens

    def abandon(self, tokens: int) -> None:
        """Only some layers have taken `tokens` more: goes back to where all agree."""
        if self.mark is not None and self.length < self.mark <= self.length + tokens:
            self._checkpoint = None  # some layers saved over it
        self.mark = None
        if self._recurrent:
            self._go_back(self.length)

    def latents(self, layer: int) -> LatentState:
        """The state of a layer of latent attention."""
        state = self.layers[layer]
        assert isinstance(state, LatentState)
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
        self.mark = None
        if self._recurrent and length < self.length:
            self._go_back(length)
        else:
            self.length = length
        return self.length

    def _go_back(self, length: int) -> None:
        """To the checkpoint if it holds no more than `length` tokens, else to the beginning."""
        if self._checkpoint is not None and self._checkpoint > length:
            self._checkpoint = None
        for layer in self._recurrent:
            if self._checkpoint is None:
                layer.clear()
            else:
                layer.restore()
        self.length = self._checkpoint or 0

    def copy(self) -> "SequenceState":
        """A sequence of its own that goes on from the same tokens."""
        other = SequenceState([layer.copy(self.length) for layer in self.layers], self.capacity)
        other.length = self.length
        return other
