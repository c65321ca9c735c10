"""What a network is, as plain facts. `architectures/` reads them from GGUF metadata; `decoder` builds from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from leanmoe.errors import FormatError

if TYPE_CHECKING:  # a plan is made without torch, which the kernels import
    from leanmoe.kernels.types import Gating

MAX_LAYERS = 512
MAX_EXPERTS = 1024
# In torch: queries attended at once, keys that they see under a mask, and keys whose scores are held at a time.
QUERY_BLOCK = 256
MASKED_KEYS = 1024
_SCORED_KEYS = 1024
# Tokens of a long prompt that go together through what needs much memory for each of them.
PART = 192
# Tokens that a GPU takes at once of the delta rule (`kernels.torch_delta`).
_DELTA_BLOCK = 64


class Metadata:
    """Typed access to the `ARCH.*` keys of a GGUF header. Every value in it is untrusted."""

    def __init__(self, values: Mapping[str, Any], arch: str, source: str) -> None:
        self.values, self.arch, self.source = values, arch, source

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.values

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int = 2**31) -> int:
        """The whole number `ARCH.key` in [low, high]. An array that holds one value throughout counts as it."""
        value = self._single(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise FormatError(f"{self.source}: {self.arch}.{key} is {value!r}; wanted {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._single(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
            raise FormatError(f"{self.source}: {self.arch}.{key} is {value!r}; wanted a finite number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self.values.get(f"{self.arch}.{key}", default)
        if not isinstance(value, str):
            raise FormatError(f"{self.source}: {self.arch}.{key} is {value!r}; wanted text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._single(key, default)
        if not isinstance(value, bool):
            raise FormatError(f"{self.source}: {self.arch}.{key} is {value!r}; wanted true or false")
        return value

    def integers(self, key: str, count: int, *, low: int = 0, high: int = 2**31) -> list[int]:
        """The whole numbers at `ARCH.key` in [low, high], one for each of `count` layers, or one for all of them."""
        value = self.values.get(f"{self.arch}.{key}")
        if value is None or not hasattr(value, "__len__") or isinstance(value, str | bytes):
            return [self.integer(key, low=low, high=high)] * count
        items = [item.item() if hasattr(item, "item") else item for item in value[:count]]
        if len(items) < count or not all(type(item) is int and low <= item <= high for item in items):
            raise FormatError(
                f"{self.source}: {self.arch}.{key} is {value!r}; wanted {count} numbers from {low} to {high}"
            )
        return items

    def flags(self, key: str, count: int) -> list[bool] | None:
        """The array of `count` truth values, one for each layer; None if the key is missing or no array."""
        value = self.values.get(f"{self.arch}.{key}")
        if value is None or not hasattr(value, "__len__"):
            return None
        if len(value) < count or any(flag not in (False, True) for flag in value):
            raise FormatError(
                f"{self.source}: {self.arch}.{key} is {value!r}; wanted {count} times true or false"
            )
        return [bool(flag) for flag in value[:count]]

    def _single(self, key: str, default: Any) -> Any:
        value = self.values.get(f"{self.arch}.{key}", default)
        if value is None:
            raise FormatError(f"{self.source}: {self.arch}.{key} is missing; a {self.arch} model needs it")
        if hasattr(value, "__len__") and not isinstance(value, str | bytes):
            items = set(value)
            if len(items) != 1:
                raise FormatError(
                    f"{self.source}: {self.arch}.{key} differs by layer ({sorted(items)[:4]}...); wanted one value"
                )
            value = items.pop()
        return value.item() if hasattr(value, "item") else value


def attended_bytes(dim: int) -> int:
    """What one thread needs to attend to a chunk's heads of `dim` at most (`csrc/attend.cpp`, `csrc/kernels.h`)."""
    rows = min(384, 384 * 128 // dim)
    return 4 * (2 * 64 * dim + rows * (2 * dim + 84) + 16)


@dataclass(frozen=True, slots=True)
class YarnRange:
    """Which frequencies YaRN keeps: those that turn more than `fast` times in the original context.

    Those that turn less than `slow` times are divided by the factor; in between it goes over gradually, from one
    whole pair to another if `whole`.
    """

    fast: float = 32.0
    slow: float = 1.0
    whole: bool = True


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of the first `rotary_dim` dimensions of each head (reference: Su et al. 2021).

    `style` "neox" pairs dimension i with i + rotary_dim/2; "norm" pairs 2i with 2i + 1.
    """

    style: Literal["neox", "norm"]
    rotary_dim: int
    base: float
    scaling: Literal["none", "linear", "yarn"] = "none"
    factor: float = 1.0
    original_context: int = 0
    yarn: YarnRange = YarnRange()
    magnitude: float = 1.0  # multiplies cos and sin
    divided: bool = True  # by `rope_freqs.weight`, where the file has it


class MixerSpec(Protocol):
    """How the tokens of a layer see those before them, and what that takes. Kinds of it: the classes below.

    The layer class for each kind is in `decoder`. Equal layers share one object.
    """

    def state_bytes(self, context: int, element_bytes: int) -> int:
        """Bytes that one layer keeps of a sequence of `context` tokens; a KV number takes `element_bytes`."""

    def scratch_bytes(self, chunk: int, context: int, threads: int) -> int:
        """Upper estimate of what `chunk` tokens need at once in one layer, beside the residual stream."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention: `heads` query heads share `kv_heads` key and value heads of `head_dim`.

    `qk_norm`: RMSNorm of q and k before rope, per "head", over the "full" projection, or None. With `gated`,
    `attn_q` gives each head its query and then a gate of the same size, whose sigmoid scales what the head saw.
    A query sees the last `window` keys, its own included. With `sinks`, each head has a score that only takes its
    share of the softmax. With `v_norm`, each value head is normed, without a weight; with `shared_kv`, values are
    made from what the keys are made from.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    scale: float
    qk_norm: Literal["head", "full"] | None = None
    gated: bool = False
    window: int | None = None
    sinks: bool = False
    v_norm: bool = False
    shared_kv: bool = False

    def state_bytes(self, context: int, element_bytes: int) -> int:
        return context * 2 * self.kv_heads * self.head_dim * element_bytes

    def scratch_bytes(self, chunk: int, context: int, threads: int) -> int:
        # Projections, rotated and rounded; what the heads saw.
        queries = self.heads * (3 if self.gated else 1)
        projections = 12 * chunk * (queries + 2 * self.kv_heads) * self.head_dim
        results = 4 * chunk * self.heads * self.head_dim
        # In torch: results of a block by part and joined; scores; a mask.
        masks = 8 * QUERY_BLOCK * (MASKED_KEYS + QUERY_BLOCK + min(self.window or 0, context))
        blocks = QUERY_BLOCK * (16 * self.heads * self.head_dim + 12 * _SCORED_KEYS)
        # A single token's: what each span of keys adds (`csrc/attend.cpp`).
        spans = 4 * self.heads * (self.head_dim + 16) * (context // _SCORED_KEYS + 2)
        return projections + results + max(blocks + masks, threads * attended_bytes(self.head_dim)) + spans


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """A gated delta net: `value_heads` memories of [key_dim, value_dim], after a convolution over `kernel` tokens.

    Each key (and query) head serves several value heads: with `grouped` neighbours (value head j reads key head
    j // R), else every key_heads-th (j % key_heads).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    grouped: bool

    @property
    def channels(self) -> int:
        """Numbers that pass through the convolution: all queries, all keys, all values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state_bytes(self, context: int, element_bytes: int) -> int:
        """Always float32, and twice: as it is, and at the checkpoint."""
        memory = self.value_heads * self.key_dim * self.value_dim
        return 2 * 4 * ((self.kernel - 1) * self.channels + memory)

    def scratch_bytes(self, chunk: int, context: int, threads: int) -> int:
        per_token = 4 * self.channels + self.value_heads * (2 * self.key_dim + 4 * self.value_dim)
        block = min(chunk, _DELTA_BLOCK)
        per_block = self.value_heads * block * (3 * block + 2 * self.key_dim + 3 * self.value_dim)
        memory = self.value_heads * self.key_dim * self.value_dim
        return 4 * (chunk * per_token + per_block + memory)


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-AI 2024): one `latent` and one rotated key per token serve all `heads`.

    A head's query has `plain_dim` dimensions that are not rotated, then those of `rope`; its value has `value_dim`.
    Queries come from a latent of `query_latent`, or from the hidden state if that is 0.
    """

    heads: int
    latent: int
    query_latent: int
    plain_dim: int
    value_dim: int
    rope: RopeSpec
    scale: float

    @property
    def entry(self) -> int:
        """Numbers that a token leaves: its latent and its rotated key."""
        return self.latent + self.rope.rotary_dim

    def state_bytes(self, context: int, element_bytes: int) -> int:
        return context * self.entry * element_bytes

    def scratch_bytes(self, chunk: int, context: int, threads: int) -> int:
        head = self.plain_dim + self.rope.rotary_dim + self.value_dim + 4 * self.entry
        # In torch a mask; in the extension what each thread works in.
        mask = 2 * 4 * min(chunk, QUERY_BLOCK) * context
        attending = max(mask, threads * attended_bytes(self.entry))
        return 4 * chunk * (self.heads * head + 2 * self.query_latent + 3 * self.entry) + attending


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How the router's logits become expert ids and weights.

    `gating` turns logits into probabilities ("chosen_softmax": a softmax over the chosen alone). The `top_k`
    largest, plus a selection bias where the file has one, are chosen. With more than one of `groups`, equal runs
    of experts, only the experts of the best `groups_used` can be: a group counts as its best expert ("max") or
    the sum of its best two ("top2"). The weights are `renormalise`d to sum to one, then multiplied by `scale`.
    """

    experts: int
    top_k: int
    gating: "Gating" = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1
    group_score: Literal["max", "top2"] = "top2"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model's shape. `mixers[i]` is layer i's; `router` is None for a dense model.

    `norm2` names the norm before the FFN. The scales multiply the embeddings, what each half of a layer adds to
    the residual stream, and the logits; with a `logit_cap` c, logits x become c tanh(x / c). With `post_norms`, what
    each half adds is normed first. `dense_beside_experts`: a layer with experts has a dense FFN of `dense_width` too.
    """

    architecture: str
    hidden: int
    vocab: int
    context_length: int
    eps: float
    mixers: tuple[MixerSpec, ...]
    dense_width: int
    router: RouterSpec | None = None
    expert_width: int = 0
    shared_width: int = 0
    shared_gate: bool = False
    moe_layers: frozenset[int] = frozenset()
    norm2: str = "ffn_norm"
    activation: str = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    post_norms: bool = False
    dense_beside_experts: bool = False

    @property
    def layers(self) -> int:
        return len(self.mixers)
