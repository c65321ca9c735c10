"""Which type each tensor gets: the mixtures of `lean pack --quant`, and the one that gpt-oss is published in."""

from leanmoe.bench.random_model.networks import Network
from leanmoe.convert.mixture import QUANTS, Shape, find_recipe, storage_types
from leanmoe.formats.quant_types import BY_NAME, QuantType

MXFP4 = "mxfp4"
MIXTURES = (*QUANTS, MXFP4)


def file_type(mixture: str) -> int:
    """The number of a mixture in `general.file_type`."""
    recipe = None if mixture == MXFP4 else find_recipe(mixture)
    return 38 if recipe is None else recipe.file_type


def choose_types(made: Network, mixture: str) -> dict[str, QuantType]:
    """The type of each tensor in `mixture`, one of `MIXTURES`. MXFP4 is for stacks of matrices; the rest is Q8_0."""
    settled = mixture == MXFP4
    tensors = {
        name: Shape(ne[::-1], BY_NAME["MXFP4"], encoded=settled and len(ne) > 2) for name, ne in made.tensors
    }
    recipe = find_recipe("q8_0" if settled else mixture)
    return storage_types(recipe, tensors, made.blocks, made.published_experts)
