"""The list of digests of a pack, in the text format of `b3sum`: `<64 hexadecimal digits>  <name>` a line."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from leanmoe.errors import FormatError
from leanmoe.formats.io import read_small_file

# No other name is ever looked up or written, so a list cannot lead outside its pack.
NAME = r"manifest\.json|trunk\.gguf|experts/[0-9]{3,4}/[0-9]{3,5}"
LINE = re.compile(rf"([0-9a-f]{{64}})  ({NAME})")
MANIFEST, TRUNK, EXPERTS, DIGESTS = "manifest.json", "trunk.gguf", "experts", "digests"
MAX_DIGESTS_BYTES = 256 << 20

Verify = Literal["first", "always", "never"]
"""When an expert file's digest is checked: on its first read since it was written, on each, or never."""


def expert_name(layer: int, expert: int) -> str:
    """The path of an expert's file within a pack."""
    return f"{EXPERTS}/{layer:03d}/{expert:03d}"


def format_digests(digests: Mapping[str, bytes]) -> bytes:
    """The text of a digest list."""
    return "".join(f"{digest.hex()}  {name}\n" for name, digest in digests.items()).encode()


def read_digests(path: Path) -> dict[str, bytes]:
    """The digests in the list `path`, by name. Raises `FormatError` if it is malformed, `OSError`."""
    raw = read_small_file(path, MAX_DIGESTS_BYTES)
    if len(raw) > MAX_DIGESTS_BYTES:
        raise FormatError(f"{path}: too long; a digest list has at most {MAX_DIGESTS_BYTES} bytes")
    digests: dict[str, bytes] = {}
    text = raw.decode("ascii", errors="replace")
    if not text.endswith("\n"):
        raise FormatError(f"{path}: does not end with a whole line; it is cut short")
    for number, line in enumerate(text[:-1].split("\n"), 1):
        match = LINE.fullmatch(line)
        if match is None:
            raise FormatError(f"{path}: line {number} is {line[:80]!r}; '<blake3 digest>  <name>' was wanted")
        if match[2] in digests:
            raise FormatError(f"{path}: line {number} lists '{match[2]}' a second time")
        digests[match[2]] = bytes.fromhex(match[1])
    return digests
