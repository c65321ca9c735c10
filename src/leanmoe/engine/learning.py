"""What a model learns of its own routing while it works: recorded as it goes, added to the pack's profile after.

Recording takes a few microseconds a layer, and memory that the plan names. What was recorded becomes statistics only
when the model is closed, when the slots' memory is free again.
"""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from leanmoe.engine.tuning import PROFILE
from leanmoe.errors import LeanError
from leanmoe.experts.policy import Phase
from leanmoe.experts.profile import ModelIdentity, RoutingProfile
from leanmoe.experts.recorder import TraceRecorder
from leanmoe.experts.trace import LayerFacts, RoutingTrace, row_type
from leanmoe.kernels import embed
from leanmoe.models.decoder import Decoder
from leanmoe.pack import Manifest, Pack

_log = logging.getLogger(__name__)
# Tokens that are learned at once: bounds the table of picks to this x layers x experts x 4 bytes.
_TOKENS_AT_ONCE = 256
# Layers whose routers make the fingerprint.
_FINGERPRINTS = 8


class Learner:
    """Watches the routing of one open pack (an `Observer`), and keeps it in the pack's profile.

    `nbytes` bounds what is recorded; with 0 nothing is. `open` comes once the routers are in memory. One thread at
    a time.
    """

    def __init__(self, pack: Pack, nbytes: int, *, probabilities: bool = False) -> None:
        self.path = pack.path / PROFILE
        self.recorder = recorder(pack.path.stem, pack.manifest, nbytes, probabilities=probabilities)
        self._identity: ModelIdentity | None = None
        self._probabilities = probabilities
        self._counts = {m.layer: np.zeros(m.expert_count) for m in pack.manifest.layers}

    def open(self, identity: ModelIdentity) -> RoutingProfile | None:
        """The pack's profile, if there is one that can be used (else a warning says why). Only its counts are kept."""
        self._identity = identity
        profile = load_profile(self.path, identity)
        if profile is not None:
            for row, layer in enumerate(profile.layers):
                self._counts[layer] += profile.counts[row, : len(self._counts[layer])]
        return profile

    def record(
        self,
        phase: Phase,
        layer: int,
        experts: npt.NDArray[Any],
        weights: npt.NDArray[Any],
        probabilities: npt.NDArray[Any],
    ) -> None:
        """See `Observer`."""
        self.recorder.record(phase, layer, experts, weights, probabilities if self._probabilities else None)
        np.add.at(self._counts[layer], experts.ravel(), 1)

    def heat(self) -> dict[int, npt.NDArray[np.float64]]:
        """How often each expert was picked, in the profile and since: for each layer [experts]."""
        return {layer: counts.copy() for layer, counts in self._counts.items()}

    def keep(self) -> None:
        """Adds what was recorded to the profile; to be called once.

        Where that fails the file stays as it was, and a warning says why: an answer is not lost for it.
        """
        trace = self.recorder.trace()
        if self._identity is None or not len(trace.rows):
            return
        try:
            learned(trace, self._identity).merge_into(self.path)
        except (LeanError, OSError) as reason:
            _log.warning("what was learned of the routing is not kept: %s", reason)


def recorder(name: str, manifest: Manifest, nbytes: int, *, probabilities: bool = False) -> TraceRecorder:
    """A recorder, of at most `nbytes`, for the routing of a packed model called `name`.

    `probabilities`: with the routers' full output.
    """
    layers = {m.layer: LayerFacts(m.expert_count, m.layout.file_bytes) for m in manifest.layers}
    scored = manifest.expert_count if probabilities else 0
    top_k = manifest.expert_used_count
    limit = nbytes // row_type(top_k, scored).itemsize
    return TraceRecorder(name, manifest.architecture, top_k, layers, probabilities=scored, limit=limit)


def model_identity(decoder: Decoder, manifest: Manifest) -> ModelIdentity:
    """What ties a profile to a model: its shape, and projections of some of its routers' weights."""
    experts = {m.layer: m.expert_count for m in manifest.layers}
    layers = sorted(experts)
    chosen = layers[:: max(1, math.ceil(len(layers) / _FINGERPRINTS))]
    prints = tuple(_projection(decoder, layer) for layer in chosen)
    return ModelIdentity(manifest.architecture, manifest.expert_used_count, experts, prints)


def _projection(decoder: Decoder, layer: int) -> float:
    """The router's weights [E, D] summed with signs that no architecture knows of, per root of their number."""
    moe = decoder.layers[layer].moe
    assert moe is not None
    router = moe.router.weight
    weights = embed(router, torch.arange(router.shape[0], device=router.data.device)).cpu().double()
    rows, columns = (
        torch.cos(torch.arange(n, dtype=torch.float64) * step)
        for n, step in zip(weights.shape, (2.3, 1.7), strict=True)
    )
    return float(rows @ weights @ columns) / math.sqrt(weights.numel())


def load_profile(path: Path, identity: ModelIdentity) -> RoutingProfile | None:
    """The profile at `path`; None where there is none or, with a warning that says why, where it cannot be used."""
    try:
        return RoutingProfile.load(path, identity)
    except FileNotFoundError:
        return None
    except (LeanError, OSError) as reason:
        _log.warning("the routing profile is not used: %s", reason)
        return None


def learned(trace: RoutingTrace, identity: ModelIdentity) -> RoutingProfile:
    """A profile of the tokens of `trace`."""
    profile = RoutingProfile(identity)
    tokens = trace.rows["token"]
    for begin in range(0, int(tokens.max(initial=0)) + 1, _TOKENS_AT_ONCE):
        part = (tokens >= begin) & (tokens < begin + _TOKENS_AT_ONCE)
        if np.any(part):
            profile.learn(trace.only(part))
    return profile
