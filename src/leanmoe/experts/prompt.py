"""What a policy learns from a prompt: how often its tokens picked each expert of a layer."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]

# A prompt, however long, says as much about a layer as so many decoded tokens of it.
_VISITS = 4


class PromptPicks:
    """What one layer picked for the tokens of a prompt, as far as it was read, and what was known of the layer before.

    `decays` are those of the memories, `before` [memories, experts] their picks, `visits_before` their visits.
    """

    def __init__(
        self, decays: Sequence[float], before: _Floats, visits_before: _Floats | None = None
    ) -> None:
        self.before = before.copy()
        self.visits_before = np.zeros(len(before)) if visits_before is None else visits_before.copy()
        self._decays, self._tokens = decays, 0
        # A token counts decay^(number of tokens after it).
        self._picked: _Floats = np.zeros((len(decays), before.shape[1]))
        self._counted: _Floats = np.zeros(len(decays))

    @property
    def visits(self) -> int:
        """As how many visits it counts."""
        return min(self._tokens, _VISITS)

    @property
    def shares(self) -> _Floats:
        """The share of its tokens that picked each expert, [decays, experts]."""
        shares: _Floats = self._picked / self._counted[:, None]
        return shares

    def read(self, picks: npt.NDArray[np.intp], experts: int) -> None:
        """Its next tokens: `picks` [tokens, top-k] as `Policy.on_prompt` has them, of so many `experts`."""
        if (more := experts - self.before.shape[1]) > 0:
            self.before, self._picked = (np.pad(a, ((0, 0), (0, more))) for a in (self.before, self._picked))
        ages = np.arange(len(picks) - 1, -1, -1)
        token, place = np.nonzero(picks >= 0)
        picked = picks[token, place]
        for i, decay in enumerate(self._decays):
            counts, left = decay**ages, decay ** len(picks)
            self._picked[i] = self._picked[i] * left + np.bincount(picked, counts[token], experts)
            self._counted[i] = self._counted[i] * left + counts.sum()
        self._tokens += len(picks)
