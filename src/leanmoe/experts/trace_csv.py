"""The text form of routing traces that several tools share: `route_trace v1`.

Comment lines `# model=NAME arch=A n_layer=L n_expert=E n_expert_used=K` and `# layer=I expert_bytes=B
dense_bytes=D`, then a line of column names and one line per pick: `turn, phase, step, layer, slot, expert,
weight, residency, expert_bytes`. `phase` is 0 in prefill and 1 in decode, `step` is the token's position,
`slot` the pick's rank; the last two columns say what the recording program's own cache did, and are ignored.

The text does not say which tokens were computed together. A turn's prompt is taken to be one step and every
decoded token one of its own.
"""

import io
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt

from leanmoe.errors import FormatError
from leanmoe.experts.files import replace_file
from leanmoe.experts.trace import NO_EXPERT, LayerFacts, RoutingTrace, Rows, row_type

_COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
_TITLE = "# route_trace v1"
_MAX_PICKS = 1 << 10
# Bounds of turn, phase, step, layer, slot and expert: what a row of a trace can hold.
_LIMITS = (1 << 16, 2, 1 << 32, 1 << 16, _MAX_PICKS, NO_EXPERT)


def import_csv(path: Path | str) -> RoutingTrace:
    """Reads a `route_trace v1` file.

    Raises `FormatError`, with the line, for what is not one; `OSError` if it cannot be read.
    """
    path = Path(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        try:
            facts, sizes, line = _read_comments(file)
            picks = _read_picks(file, line)
            layers = {i: LayerFacts(int(facts["n_expert"]), *found) for i, found in sizes.items()}
            top_k = int(facts["n_expert_used"])
            return RoutingTrace(facts["model"], facts["arch"], top_k, layers, _rows(picks))
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from None
        except (KeyError, ValueError) as error:
            raise FormatError(f"{path}: the comment lines lack a value or have an odd one: {error}") from None


def _read_comments(file: TextIO) -> tuple[dict[str, str], dict[int, tuple[int, int]], int]:
    """The model's facts, bytes of an expert and of the rest per layer, and the lines read up to the columns."""
    facts: dict[str, str] = {}
    sizes: dict[int, tuple[int, int]] = {}
    for number, line in enumerate(file, 1):
        if number == 1 and line.strip() != _TITLE:
            raise FormatError(f"the first line is {line[:40]!r}, not '{_TITLE}'")
        if not line.startswith("#"):
            if line.strip() != _COLUMNS:
                raise FormatError(f"line {number} is {line[:80]!r}, not the columns '{_COLUMNS}'")
            return facts, sizes, number
        found = dict(word.split("=", 1) for word in line[1:].split() if "=" in word)
        if "layer" in found:
            sizes[int(found["layer"])] = int(found["expert_bytes"]), int(found.get("dense_bytes", 0))
        else:
            facts |= found
    raise FormatError(f"there is no line with the columns '{_COLUMNS}'")


def _read_picks(file: TextIO, line: int) -> npt.NDArray[np.float64]:
    """Columns turn to weight of every line after `line`, [lines, 7]; the integers fit their fields."""
    try:
        picks = np.loadtxt(file, delimiter=",", usecols=range(7), ndmin=2, comments=None)
    except ValueError as error:
        raise FormatError(f"in the lines after line {line}: {error}") from None
    if not len(picks):
        return np.zeros((0, 7))
    whole = picks[:, :6]
    if (bad := ((whole < 0) | (whole >= _LIMITS) | (whole != np.floor(whole))).any(1)).any():
        at = int(bad.argmax())
        raise FormatError(f"line {line + 1 + at}: {whole[at].tolist()} does not fit '{_COLUMNS}'")
    return picks


def _rows(picks: npt.NDArray[np.float64]) -> Rows:
    """One row per (turn, phase, step, layer), in the order of computation."""
    turn, phase, token, layer, slot, expert = picks[:, :6].astype(np.int64).T
    visits, row = np.unique(np.stack([turn, phase, token, layer], 1), axis=0, return_inverse=True)
    rows = np.zeros(len(visits), row_type(int(slot.max(initial=0)) + 1))
    rows["turn"], rows["phase"], rows["token"], rows["layer"] = visits.T
    rows["experts"] = NO_EXPERT
    rows["experts"][row.ravel(), slot] = expert
    rows["weights"][row.ravel(), slot] = picks[:, 6]
    token_of = np.where(visits[:, 1] == 0, 0, visits[:, 2])  # a prompt is one step
    step = np.stack([visits[:, 0], visits[:, 1], token_of], 1)
    rows["step"] = np.unique(step, axis=0, return_inverse=True)[1].ravel()
    return rows[np.lexsort((rows["token"], rows["layer"], rows["step"]))]


def export_csv(trace: RoutingTrace, path: Path | str) -> None:
    """Writes `trace` as `route_trace v1`; router probabilities have no place in it. Raises `OSError`.

    The two columns about the recording program's cache are filled as for one that keeps nothing.
    """
    text = io.StringIO()
    most = max(facts.experts for facts in trace.layers.values())
    text.write(
        f"{_TITLE}\n# model={trace.model.replace(' ', '_')} arch={trace.architecture} "
        f"n_layer={max(trace.layers) + 1} n_expert={most} n_expert_used={trace.top_k}\n"
    )
    for i, facts in sorted(trace.layers.items()):
        text.write(f"# layer={i} expert_bytes={facts.expert_bytes} dense_bytes={facts.dense_bytes}\n")
    text.write(_COLUMNS + "\n")
    for row in trace.rows:
        place = f"{row['turn']},{row['phase']},{row['token']},{row['layer']}"
        size = trace.layers[int(row["layer"])].expert_bytes
        for slot, (expert, weight) in enumerate(zip(row["experts"], row["weights"], strict=True)):
            if expert != NO_EXPERT:
                text.write(f"{place},{slot},{expert},{weight},0,{size}\n")
    replace_file(Path(path), text.getvalue().encode())
