"""Which expert files have matched their digests, kept with the pack: while they stay so, they are not hashed again.

The file `checked` has the form of `CheckedForm`, with an empty header. Its body has for each expert the layer and its
number (4 bytes each), then the device, inode and time of change of its file (8 bytes each), all little-endian.
"""

import logging
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from leanmoe.errors import LeanError
from leanmoe.experts.files import CheckedForm
from leanmoe.experts.policy import Key
from leanmoe.kernels.files import Stamp

CHECKED = "checked"
"""The name of the file inside a pack's directory."""

_FORM = CheckedForm(
    magic=b"LEANCHK\0",
    version=1,
    name="a list of checked experts",
    newer="delete it, and experts are checked again",
    damaged="delete it, and experts are checked again",
)
_ROW = np.dtype(
    [("layer", "<i4"), ("expert", "<i4"), ("device", "<i8"), ("inode", "<i8"), ("changed", "<i8")]
)
# A file changed so shortly before it was read might be changed again within one tick of its file system's clock.
_SETTLED_NS = 2_000_000_000
_log = logging.getLogger(__name__)


def settled(stamp: Stamp) -> bool:
    """Whether a file that now has this stamp will have another one after its next change."""
    return time.time_ns() - stamp[2] > _SETTLED_NS


def load_checked(pack: Path, experts: int) -> dict[Key, Stamp]:
    """Those of the `experts` of the pack in directory `pack` that were checked, and what their files were then.

    Empty where there is no such list or, with a warning that says why, where it cannot be used.
    """
    try:
        _, body = _FORM.read(pack / CHECKED, _FORM.overhead + experts * _ROW.itemsize)
    except FileNotFoundError:
        return {}
    except (LeanError, OSError) as reason:
        _log.warning("experts are checked again: %s", reason)
        return {}
    rows = np.frombuffer(body[: len(body) // _ROW.itemsize * _ROW.itemsize], _ROW).tolist()
    return {(layer, expert): (device, inode, changed) for layer, expert, device, inode, changed in rows}


def keep_checked(pack: Path, experts: int, checked: Mapping[Key, Stamp]) -> None:
    """Adds to the list of a pack with so many experts.

    Where that fails it stays as it was, and these are checked again next time.
    """
    whole = load_checked(pack, experts) | dict(checked)
    rows = np.array([(*key, *stamp) for key, stamp in sorted(whole.items())], _ROW)
    try:
        _FORM.write(pack / CHECKED, b"", rows.tobytes())
    except OSError as reason:
        _log.info("which experts were checked is not kept: %s", reason)
