"""SentencePiece byte-pair encoding (`tokenizer.ggml.model` = `llama`): merges ordered by token scores.

`tokenizers` merges by the rank of a pair, SentencePiece by the score of the merged token, leftmost first
among equals; the two differ on runs such as "aaaa", hence a merge loop of our own (Kudo and Richardson 2018).
"""

import heapq
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial

SPACE = "▁"


class SentencePieceBpe:
    """Turns plain text (no special tokens) into ids."""

    def __init__(self, ids: Mapping[str, int], scores: Sequence[float], unknown_id: int) -> None:
        """`scores[id]` is the token's score, higher merges first. A byte without a token is `unknown_id`."""
        byte_ids = [
            ids.get(f"<0x{byte:02X}>", ids.get(chr(byte), unknown_id) if byte < 128 else unknown_id)
            for byte in range(256)
        ]
        self._boundary = re.compile(_boundary_pattern(ids))
        self._encode_word = partial(_encode_word, ids, scores, byte_ids)
        self._cached_word = lru_cache(maxsize=1 << 14)(self._encode_word)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, which holds no special tokens and no lone surrogates. Spaces become `▁`."""
        ids: list[int] = []
        for word in self._boundary.split(text.replace(" ", SPACE)):
            # Long words are rare and would crowd the cache.
            ids.extend(self._cached_word(word) if len(word) <= 64 else self._encode_word(word))
        return ids


def _encode_word(
    tokens: Mapping[str, int], scores: Sequence[float], byte_ids: Sequence[int], word: str
) -> tuple[int, ...]:
    """Merges neighbours, best score first and leftmost among equals, until no two make a token."""
    pieces = list(word)
    after = list(range(1, len(pieces) + 1))
    before = list(range(-1, len(pieces) - 1))
    queue: list[tuple[float, int, int, str]] = []

    def offer(left: int, right: int) -> None:
        if left >= 0 and right < len(pieces):
            merged = pieces[left] + pieces[right]
            token = tokens.get(merged)
            if token is not None:
                heapq.heappush(queue, (-scores[token], left, right, merged))

    for left in range(len(pieces) - 1):
        offer(left, left + 1)
    while queue:
        _, left, right, merged = heapq.heappop(queue)
        if not pieces[left] or not pieces[right] or len(pieces[left]) + len(pieces[right]) != len(merged):
            continue
        pieces[left], pieces[right] = merged, ""
        after[left] = after[right]
        if after[left] < len(pieces):
            before[after[left]] = left
        offer(before[left], left)
        offer(left, after[left])

    ids: list[int] = []
    for piece in pieces:
        if piece:
            token = tokens.get(piece)
            ids.extend([token] if token is not None else [byte_ids[byte] for byte in piece.encode()])
    return tuple(ids)


def _boundary_pattern(ids: Mapping[str, int]) -> str:
    """An expression for the places before a `▁` that no token spans: there a text may be cut into words.

    A token that spans such a place has a character followed by `▁`; a cut is made only after other
    characters.
    """
    spanned = {SPACE}
    for text in ids:
        for found in re.finditer(SPACE, text[1:]):
            spanned.add(text[found.start()])
    return rf"(?<=[^{re.escape(''.join(sorted(spanned)))}])(?={SPACE})"
