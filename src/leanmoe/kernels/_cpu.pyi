from collections.abc import Sequence

from typing_extensions import Buffer

class Plan:
    def __init__(
        self, gate: Sequence[int], up: Sequence[int], down: Sequence[int], slot_bytes: int
    ) -> None: ...
    def run(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        token: int,
        dest: int,
        pairs: int,
        x: int,
        rounded: int,
        tokens: int,
        weights: int,
        places: int,
        out: int,
        kind: int,
        limit: float,
        alpha: float,
    ) -> None: ...
    def run_some(
        self,
        slots: Sequence[int],
        places: Sequence[int],
        x: int,
        out: int,
        rows: int,
        kind: int,
        limit: float,
        alpha: float,
    ) -> None: ...
    def round(self, x: int, tokens: int, rounded: int) -> None: ...
    def rounded_bytes(self) -> int: ...
    def run_resident(
        self,
        addresses: int,
        experts: int,
        ids: int,
        top_k: int,
        x: int,
        out: int,
        kind: int,
        limit: float,
        alpha: float,
        hits: int,
        done: int,
    ) -> None: ...

class Group:
    def __init__(self, matrices: Sequence[Sequence[int]]) -> None: ...
    def run(self, x: int, tokens: int, out: Sequence[int]) -> None: ...

class Arrangement:
    def __init__(self, matrices: Sequence[Sequence[int]], bytes: int) -> None: ...
    def run(self, slot: Buffer) -> None: ...

class FileReader:
    def read(
        self,
        path: bytes,
        buffer: Buffer,
        direct: bool,
        arrangement: Arrangement | None,
        only: tuple[int, int, int] | None,
    ) -> tuple[int, int, int, tuple[int, int, int], bool]: ...
    def seconds(self) -> float: ...

READ_WHOLE: int
READ_FAILED: int
READ_NOT_REGULAR: int
READ_OTHER_SIZE: int
READ_ENDED: int

def linear(
    w: int, w_bytes: int, qtype: int, layout: int, rows: int, cols: int, x: int, tokens: int, out: int
) -> None: ...
def linear_each(
    w: int,
    w_bytes: int,
    qtype: int,
    layout: int,
    rows: int,
    cols: int,
    count: int,
    x: int,
    tokens: int,
    out: int,
) -> None: ...
def arrange(w: int, w_bytes: int, qtype: int, layout: int, rows: int, cols: int, alone: bool) -> None: ...
def multiplies(qtype: int, layout: int) -> bool: ...
def dequantize(w: int, qtype: int, rows: int, cols: int, out: int) -> None: ...
def embed(w: int, qtype: int, layout: int, rows: int, cols: int, ids: int, count: int, out: int) -> None: ...
def encode(x: int, qtype: int, rows: int, cols: int, out: int) -> bool: ...
def encoded_types() -> list[int]: ...
def convolve(
    recent_at: int, x: int, weight: int, out: int, tokens: int, channels: int, taps: int
) -> None: ...
def delta_rule(
    memory_at: int,
    q: int,
    k: int,
    v: int,
    beta: int,
    decay: int,
    out: int,
    tokens: int,
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    grouped: bool,
) -> None: ...
def rms_norm(x: int, weight: int, out: int, rows: int, width: int, eps: float) -> None: ...
def turn_heads(
    x: int,
    cos: int,
    sin: int,
    norm: int,
    out: int,
    tokens: int,
    heads: int,
    dim: int,
    half: int,
    apart: bool,
    eps: float,
) -> None: ...
def route(
    logits: int,
    bias: int,
    ids: int,
    weights: int,
    chances: int,
    tokens: int,
    experts: int,
    top_k: int,
    groups: int,
    groups_used: int,
    gating: int,
    renormalise: bool,
    best_two: bool,
    scale: float,
) -> None: ...
def weighted_sum(
    rows: int, weights: int, ids: int, onto: int, out: int, tokens: int, count: int, width: int
) -> None: ...
def largest(x: int, n: int, count: int, values: int, places: int) -> int: ...
def attend(
    q: int,
    k: int,
    v: int,
    cache_at: int,
    position_at: int,
    sinks: int,
    out: int,
    heads: int,
    kv_heads: int,
    dim: int,
    capacity: int,
    window: int,
    scale: float,
    halves: bool,
) -> None: ...
def attend_chunk(
    q: int,
    k: int,
    v: int,
    keys: int,
    values: int,
    sinks: int,
    out: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    capacity: int,
    start: int,
    window: int,
    scale: float,
    halves: bool,
) -> None: ...
def add(x: int, y: int, out: int, rows: int, width: int, scale: float, every: bool) -> None: ...
def scale(x: int, out: int, rows: int, width: int, factor: float) -> None: ...
def sigmoid_gate(x: int, gate: int, out: int, rows: int, width: int, whole: bool) -> None: ...
def glu(
    kind: int, limit: float, alpha: float, gate: int, up: int, out: int, rows: int, width: int
) -> None: ...
def angles(
    frequencies: int, positions: int, cos: int, sin: int, tokens: int, half: int, magnitude: float
) -> None: ...
def copy(
    source: int,
    to: int,
    outer: int,
    inner: int,
    width: int,
    outer_stride: int,
    inner_stride: int,
    to_outer_stride: int,
    to_inner_stride: int,
) -> None: ...
def decays(
    beta: int, alpha: int, step: int, rate: int, share: int, decay: int, tokens: int, heads: int
) -> None: ...
def unit(x: int, out: int, rows: int, width: int, eps: float, scale: float) -> None: ...

class Tape:
    def __init__(self) -> None: ...
    def record(self) -> None: ...
    def stop(self) -> None: ...
    def cut(self, done: int) -> None: ...
    def run(self, part: int) -> int: ...

ATTEND_DIM: int
ATTEND_MOST_DIM: int
MOST_EXPERTS: int

def product_types() -> list[int]: ...
def set_num_threads(n: int) -> None: ...
def get_num_threads() -> int: ...
def isa() -> str: ...
def set_isa(name: str) -> None: ...
def available_isas() -> list[str]: ...
def compiled_isas() -> list[str]: ...
def scratch_bytes() -> int: ...
def release_scratch() -> None: ...
