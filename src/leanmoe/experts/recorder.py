"""Recording a routing trace while a model runs."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from leanmoe.experts.policy import Phase
from leanmoe.experts.trace import PHASES, LayerFacts, RoutingTrace, Rows, row_type


class TraceRecorder:
    """Collects what routers pick: `record` for each layer of each step, `trace` at the end.

    `probabilities` is how many experts a router scores, if its full output is to be kept, or 0. At most
    `limit` rows are kept, of tokens times layers; what comes later is not, and `full` says so. One thread at
    a time.
    """

    def __init__(
        self,
        model: str,
        architecture: str,
        top_k: int,
        layers: Mapping[int, LayerFacts],
        *,
        probabilities: int = 0,
        limit: int = 1 << 22,
    ) -> None:
        self.full = False
        self._facts = (model, architecture, top_k, layers)
        self._kind = row_type(top_k, probabilities)
        self._limit = limit
        self._parts: list[Rows] = []
        self._rows = self._turn = self._step = 0
        self._token = self._tokens = 0  # the first of this step, and how many it has
        self._last: tuple[Phase | None, int] = (None, -1)

    def record(
        self,
        phase: Phase,
        layer: int,
        experts: npt.ArrayLike,
        weights: npt.ArrayLike,
        probabilities: npt.ArrayLike | None = None,
    ) -> None:
        """What the router of `layer` gave N tokens: `experts` and `weights` [N, top-k], probabilities [N, E].

        A step begins with a layer that is not above the last one, a turn with a prefill after a decode.
        Raises `ValueError` if the shapes do not fit or the probabilities asked for are missing.
        """
        picked = np.asarray(experts)
        if layer <= self._last[1]:
            self._step += 1
            self._token += self._tokens
            self._tokens = 0
        self._turn += phase is Phase.PREFILL and self._last[0] is Phase.DECODE
        self._last = (phase, layer)
        self._tokens = max(self._tokens, len(picked))
        if self.full or self._rows + len(picked) > self._limit:
            self.full = True
            return
        self._rows += len(picked)
        rows = np.zeros(len(picked), self._kind)
        rows["turn"], rows["phase"] = self._turn, PHASES.index(phase)
        rows["layer"], rows["step"] = layer, self._step
        # The last layer of a prompt may be computed for its last tokens only.
        rows["token"] = self._token + self._tokens - len(picked) + np.arange(len(picked))
        rows["experts"], rows["weights"] = picked, weights
        if "probabilities" in (self._kind.names or ()):
            if probabilities is None:
                raise ValueError(f"layer {layer}: no router probabilities, though they are to be recorded")
            rows["probabilities"] = probabilities
        self._parts.append(rows)

    def trace(self) -> RoutingTrace:
        """What was recorded up to now. Raises `FormatError` if it names a layer or expert that is not there."""
        rows = np.concatenate(self._parts) if self._parts else np.zeros(0, self._kind)
        return RoutingTrace(*self._facts, rows)
