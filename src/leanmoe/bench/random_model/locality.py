"""Embeddings and output rows with which any engine routes as on real text.

A token's embedding is a sum of random directions: one that all tokens share, its topic's, its phrase's, its
word's, and its own. Routers are random, so two tokens share as many experts as their embeddings have in common,
in every layer anew. The output row of each token points along its predecessor's own direction: greedy decoding
walks through the whole vocabulary, topic by topic, in a fixed order. The layers add random directions, as much as
the embedding and more where there are many: little enough that the walk goes on, and so much that the router of the
next layer, applied to the present state, names as many of its picks as in real models.

The shares of the sum are set by the routing trace of a real model (Qwen3-30B-A3B, 128 experts, decoding 128
tokens): an LRU cache of 12 / 24 % of the experts hits 56 / 80 %. The more the layers add, the more embeddings have
in common.
"""

import math

import numpy as np
import numpy.typing as npt

from leanmoe.bench.random_model.blocks import F32, U8
from leanmoe.bench.random_model.shapes import Shape
from leanmoe.bench.random_model.vocabulary import SPECIAL

ADDED = 1.38
"""The most that all layers together may add to the residual stream, beside the embedding's mean square of 1."""

# Shares of an embedding's variance at 8 experts of 128: what all tokens have in common, topic, phrase, word; where
# layers add nothing, and where they add `ADDED`.
_SHARES = np.array([[0.1, 0.52, 0.2, 0.1], [0.14, 0.55, 0.18, 0.06]])
_TOPICS, _PHRASES, _WORDS = 64, 1024, 500
_TOPIC_TOKENS, _PHRASE_TOKENS = 150, 2  # mean lengths
_OUTPUT_LOGIT = 14.0  # of the walk's next token; the others' have a standard deviation of about 1

Directions = npt.NDArray[np.int8]


class Walk:
    """A vocabulary's order and what its tokens have in common. Memory: `vocab` times `hidden` bits.

    `rng` decides all of it; `added` is what the layers add, of `ADDED` at most.
    """

    def __init__(self, shape: Shape, rng: np.random.Generator, added: float) -> None:
        self._hidden, self._count = shape.hidden, shape.vocab - len(SPECIAL)
        few, many = _SHARES
        shares = few + (many - few) * added / ADDED
        most = (1 - _least_own(shape, added)) / shares.sum()
        shares *= min(_sharing(shape.top_k / shape.experts), most)
        self._gains = np.sqrt([*shares, 1 - shares.sum()]).astype(np.float32)
        n = self._count
        self._order = rng.permutation(n)
        self._place = np.argsort(self._order)
        topic = rng.integers(0, _TOPICS, n)[_runs(rng, n, _TOPIC_TOKENS)]
        phrase = _runs(rng, n, _PHRASE_TOKENS) % _PHRASES
        # Each topic has its own frequent words; frequencies fall as the rank rises (Zipf).
        words = rng.permuted(np.tile(np.arange(_WORDS), (_TOPICS, 1)), axis=1)
        chances = 1 / np.arange(1, _WORDS + 1)
        word = words[topic, rng.choice(_WORDS, n, p=chances / chances.sum())]
        self._common = np.stack([topic, phrase, word])
        self._directions = [_directions(rng, m, shape.hidden) for m in (1, _TOPICS, _PHRASES, _WORDS)]
        self._own: U8 = rng.integers(0, 256, (n, shape.hidden // 8), np.uint8)

    def successor(self, token: int) -> int:
        """The token after `token` in greedy decoding."""
        return int(self._order[(self._place[token % self._count] + 1) % self._count])

    def embeddings(self, tokens: npt.NDArray[np.int64]) -> F32:
        """Rows [n, hidden] of mean square 1. A special token has that of an ordinary one."""
        places = self._place[tokens % self._count]
        shared, topics, phrases, words = self._directions
        rows = np.repeat(shared * self._gains[0], len(places), axis=0)
        for gain, table, which in zip(self._gains[1:], (topics, phrases, words), self._common, strict=False):
            rows += gain * table[which[places]]
        rows += self._gains[4] * self._own_directions(places)
        return rows

    def outputs(self, tokens: npt.NDArray[np.int64]) -> F32:
        """Output rows [n, hidden]. A special token's is 0: it is never the best."""
        rows = self._own_directions((self._place[tokens % self._count] - 1) % self._count).astype(np.float32)
        rows *= _OUTPUT_LOGIT / (self._hidden * self._gains[4])
        rows[tokens >= self._count] = 0
        return rows

    def _own_directions(self, places: npt.NDArray[np.int64]) -> Directions:
        return (np.unpackbits(self._own[places], axis=1).view(np.int8) << 1) - 1


def _sharing(used: float) -> float:
    """What the shares are multiplied by where the share `used` of all experts is picked: the fewer, the more
    experts two tokens have in common for equal embeddings, beside what a cache of some size holds."""
    return min(1.05, max(0.75, 1 + 0.127 * math.log2(16 * used)))


def _least_own(shape: Shape, added: float) -> float:
    """The share of an embedding that must be its token's own for the walk's next token to lead clearly.

    The largest of the others' logits, which are normal, is then 0.6 of the leader's.
    """
    return (1 + added) * 2 * math.log(shape.vocab) / (0.6**2 * shape.hidden)


def _runs(rng: np.random.Generator, n: int, mean: float) -> npt.NDArray[np.int64]:
    """The number of the run that each of `n` places is in, for runs of random length."""
    return np.cumsum(rng.random(n) < 1 / mean)


def _directions(rng: np.random.Generator, n: int, hidden: int) -> Directions:
    """`n` random vectors [n, hidden] of ones and minus ones."""
    return (rng.integers(0, 2, (n, hidden), np.int8) << 1) - 1
