"""Charts as image files, where matplotlib is installed."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from leanmoe.errors import UsageError


def require_matplotlib() -> None:
    """Raises `UsageError` if charts cannot be drawn, so that nobody waits for one in vain."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(
            "drawing needs matplotlib, which is not installed: pip install 'leanmoe[plot]'"
        ) from None


def draw_curves(
    path: Path, title: str, residency: Sequence[float], curves: Mapping[str, Sequence[float | None]]
) -> None:
    """Hit rates against residency (both 0 to 1), one curve for each name; None leaves a gap.

    The file's ending says the format. Raises `UsageError` for an ending that matplotlib does not know or if
    it is not installed, `OSError` if the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, rates in curves.items():
        points = [(100 * x, 100 * y) for x, y in zip(residency, rates, strict=True) if y is not None]
        style = "k--" if name == "belady" else "o-"
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=name, markersize=3)
    axes.set(
        xlabel="experts resident, % of bytes", ylabel="hit rate in decode, %", title=title, ylim=(0, 100)
    )
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise UsageError(f"cannot draw {path}: {error}") from None


def draw_map(
    path: Path, title: str, heat: Mapping[int, npt.NDArray[Any]], resident: Collection[tuple[int, int]]
) -> None:
    """Layers downwards, experts across; shades are logarithms of picks over the layer's mean, dots are resident.

    Raises as `draw_curves` does.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = list(heat)
    width = max(len(counts) for counts in heat.values())
    picture = np.full((len(layers), width), np.nan)
    for row, counts in enumerate(heat.values()):
        with np.errstate(divide="ignore"):
            picture[row, : len(counts)] = np.log2(counts / max(float(np.mean(counts)), 1e-9))
    figure = Figure(figsize=(max(6, width / 14), max(3, len(layers) / 7)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shown = axes.imshow(picture, aspect="auto", cmap="magma", vmin=-4, vmax=4, interpolation="nearest")
    axes.set_facecolor("black")  # never picked
    rows = {layer: row for row, layer in enumerate(layers)}
    axes.scatter([e for _, e in resident], [rows[layer] for layer, _ in resident], s=3, c="#40ff80")
    axes.set(xlabel="expert", ylabel="layer", title=f"{title}: picks, and (dots) what a warm cache holds")
    axes.set_yticks(range(0, len(layers), 4), [str(layer) for layer in layers[::4]])
    figure.colorbar(shown, label="picks over the layer's mean, log2")
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise UsageError(f"cannot draw {path}: {error}") from None
