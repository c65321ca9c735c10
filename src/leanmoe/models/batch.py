"""The tokens that one forward pass takes: any number of sequences, each with its own state and position."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from leanmoe.experts.policy import Phase
from leanmoe.models.spec import PART
from leanmoe.models.state import SequenceState


def parts(tokens: int) -> list[slice]:
    """Rows that make up so many tokens, at most `PART` at once."""
    return [slice(begin, min(begin + PART, tokens)) for begin in range(0, tokens, PART)]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence: rows `rows` of the batch, at positions `start`, start + 1, ..."""

    state: SequenceState
    start: int
    rows: slice

    def within(self, rows: slice) -> "Segment | None":
        """Its part in a batch of these rows alone; None if it has none."""
        begin, end = max(self.rows.start, rows.start), min(self.rows.stop, rows.stop)
        if begin >= end:
            return None
        return Segment(
            self.state, self.start + begin - self.rows.start, slice(begin - rows.start, end - rows.start)
        )

    def pieces(self) -> Iterator[tuple[slice, bool]]:
        """The rows, cut where the sequence wants a checkpoint; True with the piece that ends there."""
        cut = self.rows.start + (self.state.mark or 0) - self.start
        if self.rows.start < cut <= self.rows.stop:
            yield slice(self.rows.start, cut), True
        else:
            cut = self.rows.start
        if cut < self.rows.stop:
            yield slice(cut, self.rows.stop), False


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids [N], their positions [N], whose tokens they are, and the rows whose logits are wanted."""

    tokens: torch.Tensor
    positions: torch.Tensor
    segments: tuple[Segment, ...]
    logit_rows: torch.Tensor

    @property
    def phase(self) -> Phase:
        """Prefill if any sequence brings more than one token: then most experts will not be wanted again soon."""
        return Phase.PREFILL if len(self.tokens) > len(self.segments) else Phase.DECODE

    def part(self, rows: slice) -> "Batch":
        """These rows as a batch. What comes before them must have been through it."""
        if rows == slice(0, len(self.tokens)):
            return self
        segments = tuple(part for s in self.segments if (part := s.within(rows)))
        wanted = self.logit_rows[(self.logit_rows >= rows.start) & (self.logit_rows < rows.stop)] - rows.start
        return Batch(self.tokens[rows], self.positions[rows], segments, wanted)

    @classmethod
    def of(cls, parts: Sequence[tuple[SequenceState, Sequence[int]]], *, all_logits: bool = False) -> "Batch":
        """Each part continues its sequence with some tokens (a prefill chunk, or one token of decoding).

        Logits are those after each part's last token, or after every token with `all_logits`. A sequence may
        stand in a batch once. Raises `UsageError` if a sequence has no room left.
        """
        segments: list[Segment] = []
        tokens: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        if len({id(state) for state, _ in parts}) != len(parts):
            raise ValueError("a sequence may stand in a batch only once")
        for state, ids in parts:
            if not ids:
                raise ValueError("a sequence in a batch needs at least one token")
            state.reserve(len(ids))
            segments.append(Segment(state, state.length, slice(len(tokens), len(tokens) + len(ids))))
            tokens.extend(ids)
            positions.extend(range(state.length, state.length + len(ids)))
            last.append(len(tokens) - 1)
        rows = range(len(tokens)) if all_logits else last
        return cls(torch.tensor(tokens), torch.tensor(positions), tuple(segments), torch.tensor(list(rows)))
