"""Which resident expert leaves when a slot is needed.

A policy is a plain, deterministic data structure: no threads, no bytes, no files. The cache and the simulator
drive the same class. There is one instance per size class (all the experts of a layer are of one size, so a
layer belongs to exactly one), which is why a policy never sees a size.
"""

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from leanmoe.errors import UsageError
from leanmoe.experts.prompt import PromptPicks
from leanmoe.experts.slots import SlotClass

Key = tuple[int, int]
"""(layer, expert)."""

_Floats = npt.NDArray[np.float64]


class Phase(Enum):
    """Why an expert is wanted."""

    DECODE = "decode"  # the router picked it for a token being generated
    PREFILL = "prefill"  # the router picked it for prompt tokens: a scan, most of it not wanted again soon
    PRELOAD = "preload"  # nobody picked it yet


class Policy(ABC):
    """Told of every use, arrival and departure; asked for a victim.

    Calls come in this order: `on_use` once for each acquire with all its experts, resident or not (so that a
    policy can count experts that are not resident); then for each one that must be read, `victim` if no slot
    is free, `on_evict` for that victim, `on_insert` for the newcomer. A read that fails is an `on_evict` too.

    Nothing is read before `on_use` is done, so it must be quick. It comes first nevertheless: what was not picked
    just now is the first to leave, and victims chosen without knowing that cost half a point of hit rate where
    6 % are resident.

    Three more calls carry what only some policies use; a caller may skip those that the flags do not ask for.
    """

    wants_prompts = False
    """Whether `on_prompt` does anything."""
    wants_router = False
    """Whether `on_router` does anything."""
    wants_predictions = False
    """Whether `on_predict` does anything."""

    def __init__(self, slots: SlotClass) -> None:
        self.slots = slots

    @abstractmethod
    def on_use(self, keys: Sequence[Key], phase: Phase) -> None:
        """The router picked `keys`, all of one layer."""

    @abstractmethod
    def on_insert(self, key: Key, phase: Phase) -> None:
        """`key` now occupies a slot (its bytes may still be on their way)."""

    @abstractmethod
    def on_evict(self, key: Key) -> None:
        """`key` no longer occupies a slot."""

    @abstractmethod
    def victim(self, incoming: Key, phase: Phase, pinned: Callable[[Key], bool]) -> Key | None:
        """The resident expert to evict for `incoming`: never one that is `pinned`.

        None when all are pinned. For `PRELOAD`, also None when none is worth less than `incoming`; for a
        picked expert the policy must name one if any is not pinned.
        """

    def on_prompt(self, layer: int, picks: npt.NDArray[Any]) -> None:  # noqa: B027
        """In a prefill, before `on_use`: the experts of each token, [tokens, top-k] in the order of the text.

        Of several sequences, one after the other. -1 stands where a token picked fewer.
        """

    def on_router(self, layer: int, probabilities: npt.NDArray[Any]) -> None:  # noqa: B027
        """In decoding, before `on_use`: the router's probabilities, [experts] or [tokens, experts]."""

    def on_predict(self, layer: int, chances: npt.NDArray[Any]) -> None:  # noqa: B027
        """A predictor's chance, [experts] in 0 to 1, that each expert is picked at the next visit of `layer`."""


class LRU(Policy):
    """Evicts the expert that decoding has not used for the longest time.

    Prefill is scan-resistant: what it reads enters at the cold end and what it hits is not refreshed, so that
    a long prompt recycles its own slots and leaves those that decoding was using.
    """

    def __init__(self, slots: SlotClass) -> None:
        super().__init__(slots)
        self._order: OrderedDict[Key, None] = OrderedDict()  # coldest first

    def on_use(self, keys: Sequence[Key], phase: Phase) -> None:
        if phase is Phase.DECODE:
            for key in keys:
                if key in self._order:
                    self._order.move_to_end(key)

    def on_insert(self, key: Key, phase: Phase) -> None:
        self._order[key] = None
        if phase is not Phase.DECODE:
            self._order.move_to_end(key, last=False)

    def on_evict(self, key: Key) -> None:
        del self._order[key]

    def victim(self, incoming: Key, phase: Phase, pinned: Callable[[Key], bool]) -> Key | None:
        if phase is Phase.PRELOAD:
            return None
        return next((key for key in self._order if not pinned(key)), None)


# No chance is taken to be smaller, so that among hopeless experts the distance still decides.
_LEAST_CHANCE = 1e-12


class Forecast(Policy):
    """Evicts the expert that is expected to be used last; a subclass says how likely each one is.

    If an expert of a layer is picked at each visit with chance p, its next use is 1/p visits away on average,
    counted from that layer's next visit. Visits are counted in rounds of all layers, so experts of different
    layers compare. Belady's rule, with an estimate in the place of the future.

    Every layer keeps a floor: its share of one token's working set, or of the slots where those are fewer.
    Other layers' newcomers do not push it below, so a small cache does not fall off the cliff where each
    layer evicts what the next token will want first.

    Prefill is a scan, in which a layer uses most of its experts: which of them are used matters little, how often
    does. A prompt counts as a few visits that each picked its tokens' mean, later tokens counting more (by the
    policy's own memories), so that decoding finds those resident that the end of the prompt used most. In how many
    chunks it comes makes no difference.
    """

    wants_prompts = True

    def __init__(self, slots: SlotClass) -> None:
        super().__init__(slots)
        n = len(slots.layers)
        self._row = {layer: row for row, layer in enumerate(slots.layers)}
        self._floor = min(slots.working_set, slots.slots) // n
        self._resident = np.zeros((n, -(-slots.experts // n)), bool)
        self._chance: _Floats = np.zeros(self._resident.shape)
        self._wait: _Floats = np.full(self._resident.shape, -np.inf)  # visits to come; -inf: not resident
        self._longest: _Floats = np.full(n, -np.inf)  # of the waits of each layer
        self._held = np.zeros(n, np.int64)  # residents of each layer
        rows = np.arange(n)
        self._distances: _Floats = (
            (rows - rows[:, None] - 1) % n / n
        )  # from a visit to each layer's next, in rounds
        self._distance: _Floats = np.zeros(n)  # from the present visit
        self._prompts: dict[int, PromptPicks] = {}  # by row, until decoding goes on

    @abstractmethod
    def _observe(self, row: int, experts: npt.NDArray[np.intp]) -> _Floats:
        """Decoding picked `experts` in that layer: the new chance of each of its experts."""

    @abstractmethod
    def _before_prompt(self, row: int) -> PromptPicks:
        """A prompt of which nothing was read yet, and what is known of that layer."""

    @abstractmethod
    def _observe_prompt(self, row: int, prompt: PromptPicks) -> _Floats:
        """As `_observe`, of all that was read of a prompt up to now."""

    def on_prompt(self, layer: int, picks: npt.NDArray[Any]) -> None:
        if picks.size:
            row = self._row[layer]
            self._make_room(int(picks.max()))
            if row not in self._prompts:
                self._prompts[row] = self._before_prompt(row)
            prompt = self._prompts[row]
            prompt.read(picks.astype(np.intp), self._chance.shape[1])
            self._set_chance(row, self._observe_prompt(row, prompt))

    def on_use(self, keys: Sequence[Key], phase: Phase) -> None:
        if not keys:
            return
        row = self._row[keys[0][0]]
        self._distance = self._distances[row]
        if phase is Phase.DECODE:
            experts = [expert for _, expert in keys]
            self._make_room(max(experts))
            self._prompts.pop(row, None)
            self._set_chance(row, self._observe(row, np.array(experts)))

    def on_insert(self, key: Key, phase: Phase) -> None:
        self._make_room(key[1])
        row, expert = self._row[key[0]], key[1]
        self._resident[row, expert] = True
        self._wait[row, expert] = wait = 1 / max(self._chance.item(row, expert), _LEAST_CHANCE)
        self._longest[row] = max(self._longest.item(row), wait)
        self._held[row] += 1

    def on_evict(self, key: Key) -> None:
        row, expert = self._row[key[0]], key[1]
        self._resident[row, expert] = False
        self._wait[row, expert] = -np.inf
        self._longest[row] = self._wait[row].max()
        self._held[row] -= 1

    def victim(self, incoming: Key, phase: Phase, pinned: Callable[[Key], bool]) -> Key | None:
        row = self._row[incoming[0]]
        longest = self._longest + self._distance
        protected = self._held <= self._floor
        protected[row] = False
        key = self._find(np.where(protected, -np.inf, longest), pinned)
        if phase is not Phase.PRELOAD:
            return key or self._find(longest, pinned)
        self._make_room(incoming[1])
        newcomer = 1 / max(self._chance[row, incoming[1]], _LEAST_CHANCE) + self._distance[row]
        return key if key and self._expected(key) > newcomer else None

    def _expected(self, key: Key) -> float:
        row = self._row[key[0]]
        return self._wait.item(row, key[1]) + self._distance.item(row)

    def _find(self, longest: _Floats, pinned: Callable[[Key], bool]) -> Key | None:
        """The expert that is used last and not pinned, of layers with these `longest` waits, which are spoilt."""
        first: dict[int, int] = {}  # the expert with the longest wait that is not pinned, where others are
        while True:
            row = int(longest.argmax())
            if longest.item(row) == -math.inf:
                return None
            layer, waits = self.slots.layers[row], self._wait[row]
            key = (layer, first[row] if row in first else int(waits.argmax()))
            if row in first or not pinned(key):
                return key
            longest[row] = -np.inf
            for expert in (-waits).argsort(kind="stable").tolist():  # equal waits as argmax has them
                if waits.item(expert) == -math.inf:
                    break
                if not pinned((layer, expert)):
                    first[row], longest[row] = expert, waits.item(expert) + self._distance.item(row)
                    break

    def _set_chance(self, row: int, chance: _Floats) -> None:
        self._chance[row] = chance
        wait = np.where(self._resident[row], 1 / np.maximum(chance, _LEAST_CHANCE), -np.inf)
        self._wait[row] = wait
        self._longest[row] = wait.max()

    def _make_room(self, expert: int) -> None:
        """Widens the tables if a layer has more experts than the class has on average."""
        if (more := expert + 1 - self._resident.shape[1]) > 0:
            self._resident = np.pad(self._resident, ((0, 0), (0, more)))
            self._chance = np.pad(self._chance, ((0, 0), (0, more)))
            self._wait = np.pad(self._wait, ((0, 0), (0, more)), constant_values=-np.inf)


class Frequency(Forecast):
    """Decayed frequency: how often decoding picked an expert, old picks counting less and less.

    A pick loses half its weight in `half_life` visits of its layer. Counts survive eviction, without which a
    frequency cache does worse than LRU.
    """

    half_life = 32.0

    def __init__(self, slots: SlotClass) -> None:
        super().__init__(slots)
        self._decay = 0.5 ** (1 / self.half_life)

    def _observe(self, row: int, experts: npt.NDArray[np.intp]) -> _Floats:
        chance: _Floats = self._chance[row] * self._decay
        chance[experts] += 1 - self._decay
        return chance

    def _before_prompt(self, row: int) -> PromptPicks:
        return PromptPicks([self._decay], self._chance[row][None])

    def _observe_prompt(self, row: int, prompt: PromptPicks) -> _Floats:
        left = self._decay**prompt.visits
        chance: _Floats = prompt.before[0] * left + prompt.shares[0] * (1 - left)
        return chance


class Adaptive(Forecast):
    """A mixture of memories, from the last token alone to hundreds, weighted by how well each one predicts.

    Each memory is a decayed frequency with its own half-life; 0 remembers only the last visit. Routing is
    sticky in one model and repetitive in another, and both change with the text, so the weights are learned
    while running: before each visit every memory has put a distribution over the layer's experts, and its
    weight moves towards its share in the probability of what was then picked (one step of on-line
    expectation maximisation for the weights of a mixture; Cappé and Moulines 2009). A uniform distribution
    takes part, so that picks nobody could foresee are not credited to the longest memory.

    With the weight on short memories this orders experts as LRU does, with it on long ones as LFU does.
    """

    half_lives = (0.0, 1.0, 4.0, 16.0, 64.0, 256.0)
    """In visits of the layer."""
    rate = 0.02
    """How far the weights move at each visit of a layer."""
    _copies = 1  # memories of each half-life

    def __init__(self, slots: SlotClass) -> None:
        super().__init__(slots)
        n, width = self._resident.shape
        memories = self._copies * len(self.half_lives)
        self._decay = np.tile([0.5 ** (1 / h) if h else 0.0 for h in self.half_lives], self._copies)
        self._sums: _Floats = np.zeros((n, memories, width))
        # Decayed like the sums: what these must be divided by to be chances. Never 0, not even before the first.
        self._visits: _Floats = np.full((n, memories), np.finfo(np.float64).tiny)
        self.weights: _Floats = np.full(memories + 1, 1 / (memories + 1))  # the last: uniform

    def _remember(self, sums: _Floats, row: int, experts: npt.NDArray[np.intp]) -> None:
        """Adds a visit of the layer to its decayed `sums`, [memories, experts]."""
        picked = np.zeros(sums.shape[1])
        picked[experts] = 1
        sums += picked

    def _observe(self, row: int, experts: npt.NDArray[np.intp]) -> _Floats:
        sums, visits = self._sums[row], self._visits[row]
        if visits.item(0) >= 1:
            self._learn(sums, visits, experts)
        sums *= self._decay[:, None]
        self._remember(sums, row, experts)
        visits *= self._decay
        visits += 1
        return self._mixture(row)

    def _before_prompt(self, row: int) -> PromptPicks:
        return PromptPicks(self._decay[: len(self.half_lives)].tolist(), self._sums[row], self._visits[row])

    def _observe_prompt(self, row: int, prompt: PromptPicks) -> _Floats:
        left = self._decay**prompt.visits
        fresh = np.array([sum(decay**i for i in range(prompt.visits)) for decay in self._decay.tolist()])
        shares = np.tile(prompt.shares, (self._copies, 1))
        self._sums[row] = prompt.before * left[:, None] + shares * fresh[:, None]
        self._visits[row] = prompt.visits_before * left + fresh
        return self._mixture(row)

    def _mixture(self, row: int) -> _Floats:
        chance: _Floats = (self.weights[:-1] / self._visits[row]) @ self._sums[row]
        return chance

    def _learn(self, sums: _Floats, visits: _Floats, experts: npt.NDArray[np.intp]) -> None:
        """Moves each weight towards its mean share in the chances that the picks had."""
        n, weights = len(experts), self.weights
        scale, uniform = weights[:-1] / visits, weights.item(-1) * n / sums.shape[1]
        foreseen = sums.take(experts, 1)
        surprise = 1 / (scale @ foreseen + uniform)
        weights[:-1] += self.rate * (scale * (foreseen @ surprise) / n - weights[:-1])
        weights[-1] += self.rate * (uniform * surprise.sum() / n - weights[-1])

    def _make_room(self, expert: int) -> None:
        super()._make_room(expert)
        if (more := self._resident.shape[1] - self._sums.shape[2]) > 0:
            self._sums = np.pad(self._sums, ((0, 0), (0, 0), (0, more)))


class AlmostWinners(Adaptive):
    """`Adaptive`, with memories of the router's full probabilities beside those of its picks.

    An expert that almost won is likely to win next. How much that is worth is learned like the other weights:
    each half-life has a second memory, of the probabilities scaled to the number of picks.
    """

    wants_router = True
    _copies = 2  # of its picks, and of its router's probabilities

    def __init__(self, slots: SlotClass) -> None:
        super().__init__(slots)
        self._router: dict[int, _Floats] = {}

    def on_router(self, layer: int, probabilities: npt.NDArray[Any]) -> None:
        given = np.asarray(probabilities, np.float64)
        self._router[self._row[layer]] = given if given.ndim == 1 else given.max(0)

    def _remember(self, sums: _Floats, row: int, experts: npt.NDArray[np.intp]) -> None:
        n = len(self.half_lives)
        given = self._router.pop(row, None)
        if given is None:
            super()._remember(
                sums, row, experts
            )  # nothing was told of this visit: all that is known are the winners
        else:
            super()._remember(sums[:n], row, experts)
            # The winners' own share is left in: it says which of them won by little.
            sums[n:, : len(given)] += given * (len(experts) / max(float(given.sum()), _LEAST_CHANCE))


class KeepPredicted(Adaptive):
    """`Adaptive`, with a predictor's word on the layers just ahead: what it expects stays.

    A prediction holds until the layer's next visit, and can only raise a chance.
    """

    wants_predictions = True

    def on_predict(self, layer: int, chances: npt.NDArray[Any]) -> None:
        row = self._row[layer]
        self._make_room(len(chances) - 1)
        raised = self._chance[row].copy()
        np.maximum(raised[: len(chances)], chances, out=raised[: len(chances)])
        self._set_chance(row, raised)


POLICIES: dict[str, type[Policy]] = {
    "lru": LRU,
    "frequency": Frequency,
    "adaptive": Adaptive,
    "router": AlmostWinners,
    "predicted": KeepPredicted,
}
"""The policies by the name that `--policy` takes."""


def policy_named(name: str) -> type[Policy]:
    """The policy called `name`; "auto" is the one that suits most models. Raises `UsageError` for others."""
    if name == "auto":
        return Adaptive
    if name not in POLICIES:
        raise UsageError(f"there is no policy '{name}'; the policies are auto, {', '.join(POLICIES)}")
    return POLICIES[name]
