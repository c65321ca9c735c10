"""`lean map`: layers and their experts as a picture: how hot each is, and which a warm cache would hold."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TextIO

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.text import Text

from leanmoe.cli import options as opt
from leanmoe.cli.plots import draw_map, require_matplotlib
from leanmoe.engine.config import EngineConfig
from leanmoe.engine.plan import foresee_memory
from leanmoe.engine.tuning import PROFILE
from leanmoe.errors import UsageError
from leanmoe.experts.policy import Key
from leanmoe.experts.profile import ModelIdentity, RoutingProfile
from leanmoe.experts.slots import SlotPlan
from leanmoe.models.registry import model_spec
from leanmoe.pack import Pack, open_pack

Heat = Mapping[int, npt.NDArray[Any]]
# From never picked, in steps of three: a third of the mean, the mean, three times the mean, and more.
_SHADES = " ·░▒▓█"
_STEPS = (0.0, 1 / 3, 1.0, 3.0, 9.0)


@opt.memory_flags
def heat_map(
    pack: Annotated[Path, typer.Argument(help="A .lmpack directory with a profile (`lean profile`).")],
    config: EngineConfig,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it, like map.png.")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Show how often each expert of each layer is used, and which of them a warm start keeps in the budget."""
    if plot:
        require_matplotlib()
    opened = open_pack(pack)
    if not opened.manifest.layers:
        raise UsageError(f"{pack}: a model without experts has no map")
    profile = _profile(opened)
    heat = {
        layer: profile.counts[row, : profile.identity.experts[layer]]
        for row, layer in enumerate(profile.layers)
    }
    resident = _warm(profile.hottest(), _slots(opened, config))
    if as_json:
        experts = {
            layer: {
                "picks": [round(float(n), 2) for n in counts],
                "resident": [e for e in range(len(counts)) if (layer, e) in resident],
            }
            for layer, counts in heat.items()
        }
        print(json.dumps({"tokens": float(profile.tokens.max()), "layers": experts}))
    else:
        print_map(heat, resident)
    if plot:
        draw_map(plot, pack.stem, heat, resident)


def print_map(heat: Heat, resident: set[Key], file: TextIO | None = None) -> None:
    """A row for each layer; where a terminal is too narrow a character stands for the hottest of several experts."""
    console = Console(file=file or sys.stdout, highlight=False)
    width = max(len(counts) for counts in heat.values())
    several = -(-width // max(16, console.width - 24))
    console.print(
        f"each character is {several} expert{'s' * (several > 1)}; picks from none to over 9 times the mean: "
        f"'{_SHADES}'; resident ones are green and counted at the end",
        soft_wrap=True,
    )
    for layer, counts in heat.items():
        mean = max(float(np.mean(counts)), 1e-9)
        line = Text(f"{layer:5} ")
        for begin in range(0, len(counts), several):
            part = range(begin, min(begin + several, len(counts)))
            hottest = max(part, key=lambda e: counts[e])
            shade = _SHADES[sum(counts[hottest] > mean * step for step in _STEPS)]
            held = any((layer, e) in resident for e in part)
            line.append(shade, style="green" if held else "")
        held_here = sum((layer, e) in resident for e in range(len(counts)))
        line.append(f" {held_here:4}/{len(counts)}")
        console.print(line, soft_wrap=True)


def _profile(pack: Pack) -> RoutingProfile:
    path = pack.path / PROFILE
    manifest = pack.manifest
    identity = ModelIdentity(
        manifest.architecture, manifest.expert_used_count, {m.layer: m.expert_count for m in manifest.layers}
    )
    try:
        return RoutingProfile.load(path, identity)
    except FileNotFoundError:
        raise UsageError(
            f"{pack.path} has no routing profile yet; `lean profile {pack.path}` makes one, "
            "and `lean run` and `lean chat` add to it"
        ) from None


def _slots(pack: Pack, config: EngineConfig) -> list[SlotPlan]:
    made = foresee_memory(model_spec(pack.trunk), pack.trunk, pack.manifest, config)
    return [d.slots for d in made.devices if d.slots is not None]


def _warm(hottest: list[Key], plans: list[SlotPlan]) -> set[Key]:
    """What a warm start puts into the slots: the hottest, while their size has slots."""
    of_layer = {layer: c for plan in plans for c in plan.classes for layer in c.layers}
    free = {id(c): c.slots for c in of_layer.values()}
    held = set()
    for key in hottest:
        c = of_layer[key[0]]
        if free[id(c)]:
            free[id(c)] -= 1
            held.add(key)
    return held
