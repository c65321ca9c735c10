"""A token's step through the network, from a tape: recorded once, then run for one token after the other."""

import threading
from collections.abc import Callable
from dataclasses import replace

import torch

from leanmoe.kernels import Tape
from leanmoe.models.batch import Batch


class Steps:
    """Takes batches through the network as `through` does, those of one token from a tape.

    A tape serves sequences whose memories have one form; one for another form takes its place. While a thread runs
    it, others go without; so do all unless `recorded`. With or without, the bits are the same.
    """

    def __init__(self, through: Callable[[Batch], torch.Tensor], *, recorded: bool) -> None:
        self._through, self._recorded = through, recorded
        self._lock = threading.Lock()
        self._step: _Step | None = None

    def __call__(self, batch: Batch) -> torch.Tensor:
        """What `through` returns: states after the last layer, [1, hidden] of one token."""
        segment = batch.segments[0]
        alone = len(batch.tokens) == 1 and segment.state.mark is None  # saving a checkpoint is not recorded
        if not alone or not self._recorded or not self._lock.acquire(blocking=False):
            return self._through(batch)
        try:
            step = self._step
            if step is not None and step.form == segment.state.form:
                step.run(batch)
            else:
                self._step = step = None  # its memory is free before the next one's is taken
                self._step = step = _Step(self._through, batch)
            return step.x.clone()  # before another thread takes the tape
        except BaseException:
            self._step = None  # which may hold experts that it had fetched and not yet computed
            raise
        finally:
            self._lock.release()

    def forget(self) -> None:
        """Lets go of the tape and what it keeps, in any thread; another is recorded when it is wanted."""
        self._step = None


class _Step:
    """One recorded step, first taken for the batch that it is made with. `x` are the states after it."""

    def __init__(self, through: Callable[[Batch], torch.Tensor], batch: Batch) -> None:
        state = batch.segments[0].state
        self.form = state.form
        self._tokens, positions = batch.tokens.clone(), batch.positions.clone()
        self._tape = Tape(positions, state.memories)
        with self._tape.recording():
            self.x = through(replace(batch, tokens=self._tokens, positions=positions))

    def run(self, batch: Batch) -> None:
        """Takes it for another token, of a sequence of the same form."""
        segment = batch.segments[0]
        self._tokens.copy_(batch.tokens)
        self._tape.move(segment.start, segment.state.addresses)
        self._tape.run(batch)
