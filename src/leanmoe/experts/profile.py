"""Routing profiles: what a model's routing looked like so far, kept with its pack.

Two statistics. How often each expert was picked, to warm a cache. And which experts of the layers l+1 to l+6
were picked by the tokens that picked expert e in layer l, to predict several layers ahead; of these only the
most frequent are kept, so that a profile is bounded whatever the model. Old tokens count less and less.

A profile belongs to a model, not to its quantisation: `ModelIdentity` says when one fits. `docs/experts.md`
has the bytes of the file.
"""

import fcntl
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from leanmoe.errors import FormatError
from leanmoe.experts.files import CheckedForm
from leanmoe.experts.policy import Key
from leanmoe.experts.trace import NO_EXPERT, RoutingTrace

_FORM = CheckedForm(
    magic=b"LEANPRF\0",
    version=1,
    name="a routing profile",
    newer="use a newer lean, or delete the file to begin a new profile",
    damaged="delete it to begin a new profile",
)
DISTANCES = 6
"""Layers ahead that successors are kept for."""

_HALF_LIFE = 50_000  # tokens
_SUCCESSOR_BYTES = 16 << 20  # of all successors together; but at least _FEWEST for each expert
_FEWEST, _MOST = 8, 32
# What a layer's popularity counts for beside the successors of an expert, in picks of that expert. Little: an
# expert seldom picked says most about what follows (docs/experts.md).
_PRIOR_PICKS = 0.1
_FEW = 1e-6  # tokens, in place of none
# Routers are kept in float by most quantisations and in 8 bits by some: far closer than other weights are.
_SAME_FINGERPRINT = 0.02

_Floats = npt.NDArray[np.float32]
_ARRAYS = {"tokens": "<f4", "counts": "<f4", "successors": "<u2", "follow": "<f4"}


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What makes a profile's numbers mean something: the same routers over the same experts.

    `experts` maps each layer with routed experts to how many. `fingerprint` is a few numbers computed from the
    router weights, the same for every quantisation within its error; empty where they were not looked at.
    """

    architecture: str
    top_k: int
    experts: Mapping[int, int]
    fingerprint: tuple[float, ...] = ()

    def difference(self, other: "ModelIdentity") -> str | None:
        """Why `other` is another model, in words; None if it is the same."""
        for name in ("architecture", "top_k", "experts"):
            mine, its = getattr(self, name), getattr(other, name)
            if mine != its:
                return (
                    f"{name} is {its}, not {mine}" if name != "experts" else "its layers have other experts"
                )
        if not self.fingerprint:
            return None  # nothing to tell by: the router weights were not looked at
        if len(self.fingerprint) != len(other.fingerprint):
            return f"its router fingerprint has {len(other.fingerprint)} numbers, not {len(self.fingerprint)}"
        scale = max((abs(x) for x in self.fingerprint), default=0.0)
        far = max((abs(x - y) for x, y in zip(self.fingerprint, other.fingerprint, strict=True)), default=0.0)
        same = far <= _SAME_FINGERPRINT * scale
        return None if same else f"its router weights differ by {far:.3g} where they reach {scale:.3g}"


class RoutingProfile:
    """Statistics of one model's routing. Not for several threads at once.

    `tokens` [layers] is how many were learned (decayed); `counts` [layers, experts] the picks; `successors`
    and `follow` [layers, distances, experts, kept] the ids and counts of the most frequent successors, in any
    order, with count 0 where there are fewer.
    """

    def __init__(self, identity: ModelIdentity) -> None:
        self.identity = identity
        self.layers = tuple(sorted(identity.experts))
        n, width = len(self.layers), max(identity.experts.values())
        shape = (n, min(DISTANCES, n - 1), width, kept_successors(n, width))
        self.tokens: _Floats = np.zeros(n, np.float32)
        self.counts: _Floats = np.zeros((n, width), np.float32)
        self.successors: npt.NDArray[np.uint16] = np.zeros(shape, np.uint16)
        self.follow: _Floats = np.zeros(shape, np.float32)

    def learn(self, trace: RoutingTrace) -> None:
        """Adds the tokens of a trace, prompt and reply alike. Raises `ValueError` if it has other layers."""
        picked = multi_hot(trace, self.layers)
        if picked.shape[2] != self.counts.shape[1]:
            raise ValueError(f"a trace of {picked.shape[2]} experts, a profile of {self.counts.shape[1]}")
        tokens = picked.any(2).sum(1)
        self._fade(float(tokens.max(initial=0)))
        self.tokens += tokens
        self.counts += picked.sum(1)
        for layer in range(len(self.layers)):
            for distance in range(min(self.follow.shape[1], len(self.layers) - 1 - layer)):
                self._add(layer, distance, picked[layer].T @ picked[layer + distance + 1])

    def merge(self, other: "RoutingProfile") -> None:
        """Adds what another profile of the same model learned. Raises `ValueError` for another model's."""
        if why := self.identity.difference(other.identity):
            raise ValueError(why)
        self.tokens += other.tokens
        self.counts += other.counts
        for layer in range(len(self.layers)):
            for distance in range(min(self.follow.shape[1], len(self.layers) - 1 - layer)):
                self._add(layer, distance, other.followers(layer, distance))

    def popularity(self, layer: int) -> _Floats:
        """Each expert's share of the tokens, [experts] from 0 to 1; equal shares before anything was learned."""
        count, row = self.identity.experts[layer], self.layers.index(layer)
        if not self.tokens[row]:
            return np.full(count, min(1.0, self.identity.top_k / count), np.float32)
        shares: _Floats = np.minimum(self.counts[row, :count] / self.tokens[row], 1)
        return shares

    def predict(self, layer: int, experts: Sequence[int], distance: int) -> _Floats:
        """After `layer` picked `experts`: the chance of each expert of the layer `distance` (1 to 6) further on.

        The mean of `after` over the picks. Raises `IndexError` for a layer that is not there.
        """
        chances: _Floats = self.after(layer, experts, distance).mean(0)
        return chances

    def after(self, layer: int, experts: Sequence[int], distance: int) -> _Floats:
        """How often each of `experts` was followed by each expert `distance` layers on, from 0 to 1 [picks, experts].

        Leans on popularity where an expert was rarely picked, and for successors that are not kept.
        """
        row, picks = self.layers.index(layer), np.array(experts)
        prior = np.float32(_PRIOR_PICKS) * self.popularity(self.layers[row + distance])
        followed = np.zeros((len(picks), self.counts.shape[1]), np.float32)
        ids, counts = self.successors[row, distance - 1, picks], self.follow[row, distance - 1, picks]
        np.put_along_axis(followed, ids.astype(np.intp), counts, axis=1)
        # Of a prompt's tokens most may not have gone through the last layer.
        known = min(1.0, float(self.tokens[row + distance] / max(self.tokens[row], _FEW)))
        seen = known * self.counts[row, picks][:, None] + np.float32(_PRIOR_PICKS)
        chances: _Floats = (followed[:, : len(prior)] + prior) / seen
        return chances

    def hottest(self) -> list[Key]:
        """All experts that were ever picked, those first that most of their layer's tokens picked."""
        order = np.argsort(-self.counts / np.maximum(self.tokens, _FEW)[:, None], axis=None, kind="stable")
        width = self.counts.shape[1]
        flat = self.counts.ravel()
        return [(self.layers[i // width], int(i % width)) for i in order.tolist() if flat[i] > 0]

    def save(self, path: Path | str) -> None:
        """Writes the file, or leaves what was there. Raises `OSError`."""
        text = json.dumps(asdict(self.identity), separators=(",", ":")).encode()
        arrays = (getattr(self, name).astype(kind).tobytes() for name, kind in _ARRAYS.items())
        _FORM.write(Path(path), text, zlib.compress(b"".join(arrays), 1))

    @classmethod
    def load(cls, path: Path | str, identity: ModelIdentity) -> "RoutingProfile":
        """Reads a profile of the model `identity`.

        Raises `FormatError` if the file is not a profile, damaged, or another model's; `UnsupportedError` if
        its version is newer; `OSError` if it cannot be read. A model runs as well without.
        """
        path = Path(path)
        header, body = _FORM.read(path)
        try:
            return _decode(header, body, identity)
        except FormatError as error:
            raise FormatError(f"{path}: {error}; delete it to begin a new profile") from None

    def merge_into(self, path: Path | str) -> None:
        """Adds this profile to the one in the file, which is made if it is not there, in one step.

        Two processes that do so at once wait for each other (a lock on `path.lock`), so nothing is lost, and a
        crash leaves the file as it was. Raises what `load` raises, and `OSError`.
        """
        path = Path(path)
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                whole = RoutingProfile.load(path, self.identity)
                whole._fade(float(self.tokens.max()))
                whole.merge(self)
            else:
                whole = self
            whole.save(path)
        finally:
            os.close(lock)

    def _fade(self, tokens: float) -> None:
        factor = 0.5 ** (tokens / _HALF_LIFE)
        self.tokens *= np.float32(factor)
        self.counts *= np.float32(factor)
        self.follow *= np.float32(factor)

    def followers(self, layer: int, distance: int) -> _Floats:
        """How often each expert [rows] of the layer in row `layer` was followed by each [columns], `distance` + 1 on.

        As far as it was kept.
        """
        width = self.counts.shape[1]
        table = np.zeros((width, width), np.float32)
        ids, counts = self.successors[layer, distance], self.follow[layer, distance]
        np.put_along_axis(table, ids.astype(np.intp), counts, axis=1)
        return table

    def _add(self, layer: int, distance: int, more: _Floats) -> None:
        table = self.followers(layer, distance) + more
        kept = self.follow.shape[3]
        ids = np.argpartition(-table, kept - 1, axis=1)[:, :kept]
        self.successors[layer, distance] = ids
        self.follow[layer, distance] = np.take_along_axis(table, ids, axis=1)


def kept_successors(layers: int, experts: int) -> int:
    """How many successors of an expert a profile keeps, for each distance."""
    fit = _SUCCESSOR_BYTES // (6 * layers * DISTANCES * experts)
    return min(experts, max(_FEWEST, min(_MOST, fit)))


def multi_hot(trace: RoutingTrace, layers: Sequence[int]) -> _Floats:
    """Which experts each token used in each of `layers`: 1.0 or 0.0, [layers, tokens, experts].

    All 0.0 where a token was not computed (as most of a prompt in the last layer). Raises `ValueError` if the
    trace lacks a layer.
    """
    if missing := set(layers) - set(trace.layers):
        raise ValueError(f"the trace lacks the layers {sorted(missing)}")
    rows = trace.rows[np.isin(trace.rows["layer"], layers)]
    place = np.stack([rows["turn"], rows["phase"], rows["step"], rows["token"]], 1).astype(np.int64)
    token = np.unique(place, axis=0, return_inverse=True)[1].ravel()
    width = max(trace.layers[layer].experts for layer in layers)
    hot = np.zeros((len(layers), int(token.max(initial=-1)) + 1, width), np.float32)
    at = np.searchsorted(layers, rows["layer"])
    for rank in range(rows["experts"].shape[1]):
        used = rows["experts"][:, rank] != NO_EXPERT
        hot[at[used], token[used], rows["experts"][used, rank]] = 1
    return hot


def _decode(text: bytes, packed: bytes, identity: ModelIdentity) -> RoutingProfile:
    try:
        header: dict[str, Any] = json.loads(text)
        found = ModelIdentity(
            str(header["architecture"]),
            int(header["top_k"]),
            {int(i): int(n) for i, n in header["experts"].items()},
            tuple(float(x) for x in header["fingerprint"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(f"unreadable header ({error})") from None
    if why := identity.difference(found):
        raise FormatError(f"a profile of another model: {why}")
    profile = RoutingProfile(identity)
    needed = sum(getattr(profile, name).size * np.dtype(kind).itemsize for name, kind in _ARRAYS.items())
    try:
        data = zlib.decompressobj().decompress(packed, needed + 1)
    except zlib.error as error:
        raise FormatError(f"unreadable statistics ({error})") from None
    if len(data) != needed:
        raise FormatError(f"statistics of {len(data)} bytes, wanted {needed}")
    at = 0
    for name, kind in _ARRAYS.items():
        like = getattr(profile, name)
        setattr(
            profile, name, np.frombuffer(data, kind, like.size, at).reshape(like.shape).astype(like.dtype)
        )
        at += like.size * np.dtype(kind).itemsize
    counts = (profile.tokens, profile.counts, profile.follow)
    if not all(np.isfinite(a).all() and (a >= 0).all() for a in counts):
        raise FormatError("statistics that are not counts")
    if profile.successors.max(initial=0) >= profile.counts.shape[1]:
        raise FormatError("successors that are not experts of the model")
    return profile
