"""Routing traces: which experts each token used, in order, and what is needed to replay it.

A trace is a table with one row for each visit of a token to a layer. It is what policies, predictors and
budgets are judged on (`simulate`), and what profiles are learned from. `docs/experts.md` has the bytes of the
file; `trace_csv` reads and writes the `route_trace v1` text of other tools.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from leanmoe.errors import FormatError
from leanmoe.experts.files import CheckedForm
from leanmoe.experts.policy import Phase

MAGIC = b"LEANTRC\0"
_FORM = CheckedForm(
    magic=MAGIC,
    version=1,
    name="a routing trace",
    newer="export it to CSV with the lean that wrote it",
    damaged="record it again",
)
NO_EXPERT = 0xFFFF
"""Fills the row of a token that used fewer experts than the widest."""

PHASES = (Phase.PREFILL, Phase.DECODE)
"""The phases by their number in files."""

Rows = npt.NDArray[np.void]
_MAX_WIDTH = 1 << 12


class LayerFacts(NamedTuple):
    """One layer with routed experts: how many, the bytes of one, and of the layer's other weights (or 0)."""

    experts: int
    expert_bytes: int
    dense_bytes: int = 0


class Request(NamedTuple):
    """One acquire: the distinct experts that the tokens of one step use in one layer.

    `probabilities` [experts] are the router's, the largest over the tokens; None where the trace has none. `picks` are
    a prompt's, as `Policy.on_prompt` has them.
    """

    phase: Phase
    layer: int
    experts: tuple[int, ...]
    probabilities: npt.NDArray[np.float32] | None = None
    picks: npt.NDArray[np.int32] | None = None


def row_type(picks: int, probabilities: int = 0) -> np.dtype[np.void]:
    """A row of a trace, as in the file: packed, little endian.

    `turn` numbers prompts and `step` forward passes (a prompt chunk, or one token of every sequence); neither
    ever falls. `phase` is 0 in prefill and 1 in decode, `token` the position. `experts` [picks] goes from the
    strongest pick to the weakest, `weights` is what each was multiplied with, and `probabilities` (where not
    0 wide) what the router gave all experts.
    """
    fields: list[Any] = [
        ("turn", "<u2"),
        ("phase", "u1"),
        ("layer", "<u2"),
        ("step", "<u4"),
        ("token", "<u4"),
    ]
    fields += [("experts", "<u2", (picks,)), ("weights", "<f4", (picks,))]
    if probabilities:
        fields.append(("probabilities", "<f2", (probabilities,)))
    return np.dtype(fields)


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """`rows` [R] of `row_type`, in the order in which they were computed, and the model they came from.

    Raises `FormatError` (which names no file) if a layer, an expert or a phase is out of range.
    """

    model: str
    architecture: str
    top_k: int
    layers: Mapping[int, LayerFacts]
    rows: Rows

    def __post_init__(self) -> None:
        _check_facts(self)
        _check_rows(self)

    @property
    def has_probabilities(self) -> bool:
        """Whether the router's full probabilities were recorded."""
        return "probabilities" in (self.rows.dtype.names or ())

    @property
    def picks(self) -> int:
        """Experts used, over all rows."""
        return int((self.rows["experts"] != NO_EXPERT).sum())

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts of all layers."""
        return sum(layer.experts * layer.expert_bytes for layer in self.layers.values())

    @property
    def tokens(self) -> dict[Phase, int]:
        """How many tokens of each phase there are."""
        rows = self.rows
        return {p: len(np.unique(rows["token"][rows["phase"] == i])) for i, p in enumerate(PHASES)}

    def only(self, chosen: npt.NDArray[np.bool_]) -> "RoutingTrace":
        """The trace of the rows where `chosen` [R] is true."""
        return replace(self, rows=self.rows[chosen])

    def requests(self) -> Iterator[Request]:
        """What a cache is asked for: the rows of one step, layer and phase are one request.

        Within a step the layers come in order, whatever the order of the rows.
        """
        order = np.lexsort((self.rows["phase"], self.rows["layer"], self.rows["step"]))
        rows = self.rows[order]
        keys = rows[["step", "layer", "phase"]]
        starts = [0, *(np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist(), len(rows)]
        for start, end in pairwise(starts) if len(rows) else ():
            layer = int(rows["layer"][start])
            picked = rows["experts"][start:end].ravel().tolist()
            given = None
            if self.has_probabilities:
                given = rows["probabilities"][start:end, : self.layers[layer].experts].max(0).astype("f4")
            experts = tuple(dict.fromkeys(e for e in picked if e != NO_EXPERT))
            phase, picks = PHASES[rows["phase"][start]], None
            if phase is Phase.PREFILL:
                picks = rows["experts"][start:end].astype(np.int32)
                picks[picks == NO_EXPERT] = -1
            yield Request(phase, layer, experts, given, picks)

    def save(self, path: Path | str) -> None:
        """Writes the file, or leaves what was there. Raises `OSError`."""
        names = self.rows.dtype.names or ()
        header = {
            "model": self.model,
            "architecture": self.architecture,
            "top_k": self.top_k,
            "layers": {str(i): list(facts) for i, facts in self.layers.items()},
            "rows": len(self.rows),
            "picks": self.rows.dtype["experts"].shape[0],
            "probabilities": self.rows.dtype["probabilities"].shape[0] if "probabilities" in names else 0,
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        _FORM.write(Path(path), text, self.rows.tobytes())

    @classmethod
    def load(cls, path: Path | str) -> "RoutingTrace":
        """Reads and checks a file that `save` wrote.

        Raises `FormatError` if it is not one, was cut short or damaged, `UnsupportedError` if its version is
        newer, `OSError` if it cannot be read.
        """
        path = Path(path)
        header, body = _FORM.read(path)
        try:
            return _decode(header, body)
        except FormatError as error:
            raise FormatError(f"{path}: {error}; record it again") from None


def _decode(text: bytes, body: bytes) -> RoutingTrace:
    try:
        header = json.loads(text)
        model, architecture = str(header["model"]), str(header["architecture"])
        top_k, rows, picks, wide = (int(header[n]) for n in ("top_k", "rows", "picks", "probabilities"))
        layers = {int(i): LayerFacts(*map(int, facts)) for i, facts in header["layers"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(f"unreadable header ({error})") from None
    if not (1 <= picks <= _MAX_WIDTH and 0 <= wide < NO_EXPERT):
        raise FormatError(f"rows of {picks} experts and {wide} probabilities")
    kind = row_type(picks, wide)
    if rows * kind.itemsize != len(body):
        raise FormatError(f"{rows} rows of {kind.itemsize} bytes announced, {len(body)} bytes found")
    return RoutingTrace(model, architecture, top_k, layers, np.frombuffer(body, kind))


def _check_facts(trace: RoutingTrace) -> None:
    if trace.top_k < 1 or not trace.layers:
        raise FormatError(f"top-k is {trace.top_k} in {len(trace.layers)} layers; both must be at least 1")
    for i, facts in trace.layers.items():
        sizes_fit = 0 < facts.expert_bytes < 1 << 48 and facts.dense_bytes >= 0
        if not (0 <= i <= 0xFFFF and 0 < facts.experts < NO_EXPERT and sizes_fit):
            raise FormatError(
                f"layer {i} is said to have {facts.experts} experts of {facts.expert_bytes} bytes"
            )
    most = max(facts.experts for facts in trace.layers.values())
    if trace.has_probabilities and trace.rows.dtype["probabilities"].shape[0] < most:
        raise FormatError(f"router probabilities for fewer than the {most} experts of a layer")


def _check_rows(trace: RoutingTrace) -> None:
    rows, experts = trace.rows, trace.rows["experts"]
    counts = np.zeros(0x10000, np.int64)
    counts[list(trace.layers)] = [facts.experts for facts in trace.layers.values()]
    count = counts[rows["layer"]][:, None]
    missing = experts == NO_EXPERT
    faults = {
        "is of a layer that the header does not have": count[:, 0] == 0,
        "uses an expert that its layer does not have": ((experts >= count) & ~missing).any(1),
        "uses no expert": missing[:, 0],
        "has a gap among its experts": (missing[:, :-1] & ~missing[:, 1:]).any(1),
        "has a phase that is neither 0 nor 1": rows["phase"] > 1,
        "has a weight that is not a number": ~np.isfinite(rows["weights"]).all(1),
        "belongs to an earlier step than the row before it": np.diff(rows["step"].astype(np.int64), prepend=0)
        < 0,
    }
    if trace.has_probabilities:
        given = rows["probabilities"]
        faults["has a router probability that is not one"] = ~((given >= 0) & (given <= 1)).all(1)
    for fault, found in faults.items():
        if found.any():
            raise FormatError(f"row {int(found.argmax())} {fault}")
