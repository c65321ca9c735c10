"""The ggml tensor types that may stand in a file: their ids, names and block sizes.

Source: the type table of GGUF (ggml.h); checked against the `gguf` package in the tests.
"""

from dataclasses import dataclass

from leanmoe.errors import FormatError, UnsupportedError


@dataclass(frozen=True, slots=True)
class QuantType:
    """A tensor type: every `block` consecutive elements of a row take `block_bytes` bytes."""

    id: int
    name: str
    block: int
    block_bytes: int

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of `n` elements. Raises `FormatError` unless `n` is a multiple of the block."""
        if n % self.block:
            raise FormatError(
                f"a row of {n} elements is not a whole number of {self.name} blocks ({self.block})"
            )
        return n // self.block * self.block_bytes


_TABLE = [
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
    (42, "Q2_0", 64, 18),
]

BY_ID: dict[int, QuantType] = {row[0]: QuantType(*row) for row in _TABLE}
BY_NAME: dict[str, QuantType] = {t.name: t for t in BY_ID.values()}


def quant_type(id_or_name: int | str) -> QuantType:
    """The type with this ggml id or name. Raises `UnsupportedError` for one that is not in the table."""
    found = BY_ID.get(id_or_name) if isinstance(id_or_name, int) else BY_NAME.get(id_or_name)
    if found is None:
        raise UnsupportedError(f"tensor type {id_or_name!r} is unknown; known: {', '.join(BY_NAME)}")
    return found
