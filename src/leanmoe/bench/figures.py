"""The comparison's plots."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanmoe.bench.programs import Record
from leanmoe.cli.plots import require_matplotlib

_COLOURS = {"lean": "#1f6feb", "llama.cpp": "#d1652b"}
_PARTS = {
    "kernel": ("kernels", "#1f6feb"),
    "stall": ("waiting for reads", "#d1652b"),
    "rest": ("rest", "#8b949e"),
}


def draw_all(folder: Path, results: Sequence[Record]) -> list[Path]:
    """Draws what `results` have figures for, as PNG files in `folder`; returns their paths.

    Raises `UsageError` if matplotlib is not installed.
    """
    require_matplotlib()
    drawn = []
    for phase in ("decode", "prompt"):
        if any(r.get(f"{phase}_tokens") for r in results):
            drawn.append(draw_speed(folder / f"{phase}-speed.png", phase, results))
    own = [r for r in results if r.get("decode_tokens") and "decode_hit_rate" in r]
    if own:
        drawn += [draw_hits(folder / "hit-rate.png", own), draw_times(folder / "time.png", own)]
    return drawn


def draw_speed(path: Path, phase: str, results: Sequence[Record]) -> Path:
    """Tokens a second at each memory limit: lean beside the best setting of llama.cpp."""
    limits = list(dict.fromkeys(r["limit_name"] for r in results))
    figure, axes = _figure()
    rate = f"{phase}_tokens_per_second"
    for place, engine in enumerate(_COLOURS):
        for x, limit in enumerate(limits):
            here = [r for r in results if (r["engine"], r["limit_name"]) == (engine, limit)]
            best = max((r[rate] for r in here if r.get(rate) and r.get(f"{phase}_tokens")), default=0.0)
            label = engine if x == 0 else None
            bar = axes.bar(x + (place - 0.5) * 0.38, best, 0.36, color=_COLOURS[engine], label=label)
            axes.bar_label(bar, [f"{best:.3g}" if best else "none"], fontsize=8)
    axes.set_xticks(range(len(limits)), limits)
    axes.set(xlabel="memory limit", ylabel="tokens/s", title=f"{phase}, tokens a second")
    axes.legend()
    return _save(figure, path)


def draw_hits(path: Path, own: Sequence[Record]) -> Path:
    """lean's hit rate in decode against the share of the experts' bytes that has slots."""
    figure, axes = _figure()
    points = sorted((100 * r["residency"], 100 * r["decode_hit_rate"]) for r in own)
    axes.plot([x for x, _ in points], [y for _, y in points], "o-", color=_COLOURS["lean"])
    axes.set(
        xlabel="experts resident, % of bytes", ylabel="hit rate in decode, %", xlim=(0, 102), ylim=(0, 102)
    )
    axes.set_title("hit rate against residency")
    return _save(figure, path)


def draw_times(path: Path, own: Sequence[Record]) -> Path:
    """Where the time of one of lean's tokens goes, at each limit."""
    figure, axes = _figure()
    below = [0.0] * len(own)
    for part, (label, colour) in _PARTS.items():
        heights = [1000 * r[f"decode_{part}_seconds"] for r in own]
        axes.bar(range(len(own)), heights, 0.5, bottom=below, color=colour, label=label)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.set_xticks(range(len(own)), [r["limit_name"] for r in own])
    axes.set(xlabel="memory limit", ylabel="ms", title="one token of lean's")
    axes.legend()
    return _save(figure, path)


def _figure() -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path
