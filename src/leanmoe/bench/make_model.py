"""Models of public shapes with random weights: `python -m leanmoe.bench.make_model SHAPE OUT`.

A GGUF, its header alone (`--header-only`, for `lean plan`), or a pack (`--pack`, where the disk has no room for
both). With `--locality` it routes as on real text, in any engine, and says a fixed sequence of words; `--text N` writes
the first so many of them, for a prompt.
"""

import argparse
import os
import sys
from pathlib import Path

from leanmoe.bench.random_model.files import RandomSource, virtual_file, write_gguf
from leanmoe.bench.random_model.mixtures import MIXTURES
from leanmoe.bench.random_model.networks import network
from leanmoe.bench.random_model.shapes import SHAPES, Shape
from leanmoe.bench.random_model.vocabulary import vocabulary, words
from leanmoe.bench.random_model.weights import Weights
from leanmoe.errors import BudgetError, LeanError, UsageError
from leanmoe.pack import PackProgress, pack_source
from leanmoe.units import format_bytes


def make_model(
    shape: str | Shape,
    out: Path,
    *,
    layers: int | None = None,
    experts: int | None = None,
    quant: str | None = None,
    pack: bool = False,
    header_only: bool = False,
    locality: bool = False,
    prediction: bool = False,
    seed: int = 0,
    progress: bool = False,
) -> Weights:
    """Makes a model of `shape` (a name in `SHAPES`, or one of your own) at `out`, which must not exist.

    `layers` and `experts` (of each layer; a token uses as many as ever) are the shape's unless given.
    Returns what fills it; with `locality` its `walk` is the order of tokens in greedy decoding.

    Raises `UsageError`, and `BudgetError` if the disk is too small.
    """
    name = shape if isinstance(shape, str) else shape.architecture
    shape = _known(shape)
    _absent(out)
    if pack and header_only:
        raise UsageError("--pack and --header-only exclude each other")
    made = network(shape, layers=layers, experts=experts, prediction=prediction)
    weights = Weights(made, seed, locality=locality)
    about = f"random weights, seed {seed}" + (", with locality" if locality else "")
    about += "" if experts is None else f", {experts} experts"
    path = out.with_suffix(".gguf") if pack else out
    file = virtual_file(path, made, quant or shape.quant, name, about)
    say = _say if progress else None
    if pack:
        pack_source(RandomSource(file, weights), out, progress=say)
        return weights
    if not header_only and file.nbytes > (free := _free_bytes(out.parent)):
        raise BudgetError(
            f"{out}: takes {format_bytes(file.nbytes)} but {format_bytes(free)} are free; make room, or take "
            "fewer --layers"
        )
    try:
        write_gguf(file, None if header_only else weights, say)
    except BaseException:
        out.unlink(missing_ok=True)
        raise
    return weights


def make_text(shape: str | Shape, tokens: int, seed: int = 0) -> str:
    """So many tokens of words in the order in which a model with locality says them, whatever its layers.

    A prompt of them is routed as one of real text is: a topic after the other, each with words of its own. Raises
    `UsageError` for fewer than one token, or if the vocabulary is too small for words.
    """
    if tokens < 1:
        raise UsageError(f"a text of {tokens} tokens; wanted at least 1")
    shape = _known(shape)
    walk = Weights(network(shape), seed, locality=True).walk
    known = words(vocabulary(shape.vocab))
    if not known:
        raise UsageError(f"a vocabulary of {shape.vocab} tokens has no words")
    assert walk is not None
    said: list[str] = []
    token = 0
    while len(said) < tokens:
        token = walk.successor(token)
        if token in known:
            said.append(known[token])
    return "".join(said)


def _known(shape: str | Shape) -> Shape:
    if not isinstance(shape, str):
        return shape
    if shape not in SHAPES:
        raise UsageError(f"shape '{shape}' is unknown; known: {', '.join(SHAPES)}")
    return SHAPES[shape]


def _absent(path: Path) -> Path:
    if os.path.lexists(path):
        raise UsageError(f"{path}: already exists; delete it, or give another name")
    return path


def _free_bytes(path: Path) -> int:
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def _say(done: PackProgress) -> None:
    end = "\n" if done.done == done.total else ""
    text = f"\r{format_bytes(done.done)} of {format_bytes(done.total)}, {done.name}"
    print(text.ljust(79), end=end, file=sys.stderr, flush=True)


def main() -> None:
    """Parses arguments and makes the model."""
    parser = argparse.ArgumentParser(
        prog="python -m leanmoe.bench.make_model",
        description="A model of a public shape with random weights.",
        epilog=f"Shapes: {', '.join(SHAPES)}.",
    )
    parser.add_argument("shape", metavar="SHAPE", help="which model's shape")
    parser.add_argument("out", metavar="OUT", type=Path, help="the GGUF file, pack or text to write")
    parser.add_argument(
        "--text", metavar="N", type=int, help="no model, but N tokens of what one with --locality says"
    )
    parser.add_argument("--layers", type=int, help="only the first so many")
    parser.add_argument(
        "--experts", type=int, help="so many in each layer; a token uses as many as the shape says"
    )
    parser.add_argument(
        "--quant", choices=MIXTURES, help="the mixture of types (default: as it is published)"
    )
    parser.add_argument("--pack", action="store_true", help="write a pack, and no GGUF")
    parser.add_argument("--header-only", action="store_true", help="a GGUF that takes no room: no data in it")
    parser.add_argument("--locality", action="store_true", help="route as on real text")
    parser.add_argument("--mtp", action="store_true", help="with the layers for multi-token prediction")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.text is not None:
        for name in ("layers", "experts", "quant", "pack", "header_only", "locality", "mtp"):
            if getattr(options, name):
                raise UsageError(f"--{name.replace('_', '-')} is of models, and --text writes a text")
        out = _absent(options.out)
        out.write_text(make_text(options.shape, options.text, options.seed), encoding="ascii")
        return
    make_model(
        options.shape,
        options.out,
        layers=options.layers,
        experts=options.experts,
        quant=options.quant,
        pack=options.pack,
        header_only=options.header_only,
        locality=options.locality,
        prediction=options.mtp,
        seed=options.seed,
        progress=sys.stderr.isatty(),
    )


if __name__ == "__main__":
    try:
        main()
    except LeanError as error:
        sys.exit(f"make_model: {error}")
