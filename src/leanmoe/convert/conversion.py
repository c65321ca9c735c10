"""What one architecture's conversion says, and the table of all that there are."""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module

from leanmoe.convert.block import Block, Named
from leanmoe.convert.config import Config
from leanmoe.errors import UnsupportedError
from leanmoe.formats.gguf_values import Value


@dataclass(frozen=True, slots=True)
class Conversion:
    """How checkpoints of one family become GGUF.

    `architecture` is the GGUF's name for it. `metadata` gives its keys, without the architecture's prefix.
    `block` gives the tensors of one block, without `blk.N.`; `top` those that belong to no block. `pre` names the
    word splits (`tokenizer.ggml.pre`) that the family is known to use, the first preferred. `ignored` are patterns
    of names in the checkpoint that are left out on purpose.
    """

    architecture: str
    metadata: Callable[[Config], Mapping[str, Value]]
    block: Callable[[Block], Iterator[Named]]
    top: Callable[[Block], Iterator[Named]]
    pre: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def _conversions() -> dict[str, Conversion]:
    from leanmoe.convert import architectures

    found: dict[str, Conversion] = {}
    for module in pkgutil.iter_modules(architectures.__path__):
        found |= getattr(import_module(f"{architectures.__name__}.{module.name}"), "CONVERSIONS", {})
    return found


def supported_models() -> list[str]:
    """The model types (`model_type` in config.json) that can be converted."""
    return sorted(_conversions())


def find_conversion(config: Config) -> Conversion:
    """The conversion for the model that `config` describes. Raises `UnsupportedError` if there is none."""
    conversions = _conversions()
    if config.model_type not in conversions:
        raise UnsupportedError(
            f"{config.source}: model_type '{config.model_type[:80]}' cannot be converted; "
            f"known: {', '.join(sorted(conversions))}"
        )
    return conversions[config.model_type]
