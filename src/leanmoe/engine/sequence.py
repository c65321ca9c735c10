"""One sequence being generated: the tokens that the network has seen, and what it remembers of them."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

import torch

from leanmoe.models.batch import Batch
from leanmoe.models.decoder import Cancelled, Decoder
from leanmoe.models.state import SequenceState

# Tokens at the end of a prompt that may be peculiar to it: a chat template's opening of the answer.
_OPENING = 16


class Sequence:
    """A state and the tokens it stands for. `tokens[i]` was fed at position i."""

    def __init__(self, state: SequenceState) -> None:
        self.state = state
        self.tokens: list[int] = []

    def reset(self) -> None:
        self.tokens.clear()
        self.state.truncate(0)

    def keep_prefix(self, tokens: SequenceOf[int]) -> int:
        """Forgets what `tokens` does not begin with (or more); returns how many tokens need not be fed again.

        At least one token of `tokens` is always left to feed, since its logits are wanted.
        """
        del self.tokens[self.state.length :]  # a pass that failed may have cost some
        shared = 0
        for mine, wanted in zip(self.tokens, tokens[:-1], strict=False):
            if mine != wanted:
                break
            shared += 1
        kept = self.state.truncate(shared)
        del self.tokens[kept:]
        return kept


def prefill(
    decoder: Decoder,
    sequence: Sequence,
    tokens: SequenceOf[int],
    chunk: int,
    cancelled: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    opening: int = _OPENING,
) -> torch.Tensor | None:
    """Feeds `tokens` (at least one) in chunks and returns the logits [vocab] after the last.

    None if `cancelled` said so, within a chunk or between two; the sequence then holds the chunks that were fed, or, if
    it has recurrent layers, what its checkpoint has. `progress` is told before and after each chunk how many tokens
    are done, and of how many. Recurrent layers keep a checkpoint from before the last `opening` tokens.
    """
    state = sequence.state
    state.reserve(len(tokens))
    end = state.length + len(tokens)
    # The next turn of a conversation shares this prompt, but not always the few tokens that open the answer.
    state.mark = end - opening if len(tokens) > opening else None
    logits: torch.Tensor | None = None
    for begin in range(0, len(tokens), chunk):
        progress(begin, len(tokens))
        if cancelled():
            return None
        part = list(tokens[begin : begin + chunk])
        try:
            logits = decoder.forward(Batch.of([(state, part)]), cancelled)[0]
        except Cancelled:
            del sequence.tokens[state.length :]
            return None
        sequence.tokens.extend(part)
    progress(len(tokens), len(tokens))
    return logits


def decode(
    decoder: Decoder,
    sequence: Sequence,
    logits: torch.Tensor,
    sampler: Callable[[torch.Tensor, list[int]], int],
    cancelled: Callable[[], bool],
) -> Iterator[int]:
    """The token loop: draw from `logits`, hand the token out, feed it, repeat.

    Ends when the context is full or `cancelled` says so; the caller stops it at a stop token.
    """
    while True:
        token = sampler(logits, sequence.tokens)
        yield token
        if cancelled() or sequence.state.length >= sequence.state.capacity:
            return
        logits = decoder.forward(Batch.of([(sequence.state, [token])]))[0]
        sequence.tokens.append(token)
