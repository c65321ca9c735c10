"""How good predictors are, on a trace: the share of the picks that were among the B experts predicted."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from leanmoe.experts.policy import Phase
from leanmoe.experts.profile import DISTANCES, ModelIdentity, RoutingProfile, multi_hot
from leanmoe.experts.trace import PHASES, RoutingTrace

_Floats = npt.NDArray[np.float32]


def recalls(trace: RoutingTrace, budgets: Sequence[int]) -> Mapping[str, list[float]]:
    """For each predictor, its recall (0 to 1) if it may name `budgets` experts of a layer.

    A profile is learned on the first half of the decoded tokens and tested on the second: "popularity" (the
    most used experts of the layer), "transition +1" to "+6" (the profile's successors, that many layers
    ahead). "previous token" names what the layer picked last, then what is popular. Empty when there are
    fewer than two decoded tokens.
    """
    layers = tuple(sorted(trace.layers))
    decoded = trace.only(trace.rows["phase"] == PHASES.index(Phase.DECODE))
    steps = np.unique(decoded.rows["step"])
    if len(steps) < 2:
        return {}
    middle = steps[len(steps) // 2]
    profile = RoutingProfile(
        ModelIdentity(
            trace.architecture, trace.top_k, {i: facts.experts for i, facts in trace.layers.items()}
        )
    )
    profile.learn(decoded.only(decoded.rows["step"] < middle))
    after = decoded.only(decoded.rows["step"] >= middle)
    later = multi_hot(after, layers)
    popular = _popular(profile, later)
    previous = _recall(later[:, :-1] + popular[:, 1:] * np.float32(0.5), later[:, 1:], budgets)
    found = profile_recall(profile, after, budgets)
    return {"popularity": found.pop("popularity"), "previous token": previous, **found}


def profile_recall(
    profile: RoutingProfile, trace: RoutingTrace, budgets: Sequence[int]
) -> dict[str, list[float]]:
    """As `recalls`, of a profile that was learned elsewhere: "popularity" and "transition +1" to "+6"."""
    later = multi_hot(trace, profile.layers)
    found = {"popularity": _recall(_popular(profile, later), later, budgets)}
    for distance in range(1, min(DISTANCES, len(profile.layers) - 1) + 1):
        chances = np.zeros((len(profile.layers) - distance, *later.shape[1:]), np.float32)
        for row, layer in enumerate(profile.layers[:-distance]):
            count = profile.identity.experts[layer]
            after = profile.after(layer, range(count), distance)
            chances[row, :, : after.shape[1]] = later[row, :, :count] @ after  # a sum ranks as a mean does
        found[f"transition +{distance}"] = _recall(chances, later[distance:], budgets)
    return found


def _popular(profile: RoutingProfile, like: _Floats) -> _Floats:
    """The same chances for every token, in the shape of `like`: [layers, tokens, experts]."""
    popular = np.stack([_padded(profile.popularity(layer), like.shape[2]) for layer in profile.layers])
    return np.broadcast_to(popular[:, None], like.shape)


def _recall(chances: _Floats, picked: _Floats, budgets: Sequence[int]) -> list[float]:
    """Both [layers, tokens, experts]."""
    order = np.argsort(-chances, axis=-1, kind="stable")
    hits = np.take_along_axis(picked, order, axis=-1).sum((0, 1))
    return [float(hits[:budget].sum() / max(picked.sum(), 1)) for budget in budgets]


def _padded(chances: _Floats, width: int) -> _Floats:
    return np.pad(chances, (0, width - len(chances)))
