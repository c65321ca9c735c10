"""How the writing of a pack is cut into steps: after each, what it wrote is on disk and recorded."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from leanmoe.pack.consume import Range, whole_pages
from leanmoe.pack.plan import Piece, Target

# A step's files stay open until it is synced, so their number is bounded too. With --consume a step is also
# what must fit on the disk before the source's part of it is freed.
STEP_BYTES = 64 << 20
STEP_FILES = 128


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes from `start` to `end` of one target."""

    target: Target
    start: int
    end: int

    def pieces(self) -> Iterator[Piece]:
        """What these bytes are made of, in order; none is empty."""
        at = 0
        for piece in self.target.pieces():
            begin, end = max(self.start - at, 0), min(self.end - at, piece.nbytes)
            if begin < end:
                data = piece.data[begin:end]
                yield replace(piece, nbytes=end - begin, offset=piece.offset + begin, data=data)
            at += piece.nbytes

    def source_ranges(self) -> Iterator[Range]:
        """The ranges of the source that these bytes are copied from."""
        for piece in self.pieces():
            if piece.path is not None:
                yield piece.path, piece.offset, piece.offset + piece.nbytes


def finished_parts(
    targets: Iterable[Target], digests: Mapping[str, bytes], marks: Mapping[str, int]
) -> list[Part]:
    """What is already on disk, by the journal's `digests` and `marks`."""
    parts = []
    for target in targets:
        end = target.nbytes if target.name in digests else marks.get(target.name, 0)
        if end:
            parts.append(Part(target, 0, end))
    return parts


def plan_steps(
    targets: Iterable[Target], digests: Mapping[str, bytes], marks: Mapping[str, int]
) -> Iterator[list[Part]]:
    """The steps that remain. A file larger than a step is cut; any other is written whole within one step."""
    step: list[Part] = []
    room = STEP_BYTES
    for target in targets:
        if target.name in digests:
            continue
        start = marks.get(target.name, 0)
        while start < target.nbytes:
            end = min(target.nbytes, start + STEP_BYTES)
            if step and (end - start > room or len(step) == STEP_FILES):
                yield step
                step, room = [], STEP_BYTES
            step.append(Part(target, start, end))
            room -= end - start
            start = end
    if step:
        yield step


def peak_growth(steps: Iterable[list[Part]], frees_source: bool) -> int:
    """The disk bytes needed at the worst moment of `steps`; each frees its source if `frees_source`."""
    used = peak = 0
    for step in steps:
        used += sum(part.end - part.start for part in step)
        peak = max(peak, used)
        if frees_source:
            ranges = whole_pages(r for part in step for r in part.source_ranges())
            used -= sum(end - start for _, start, end in ranges)
    return peak
