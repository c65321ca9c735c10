"""Which type each tensor gets: the mixtures that llama.cpp's names such as Q4_K_M stand for.

Source: section 14.2 of the project's format reference (what llama-quantize does without an importance matrix).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from leanmoe.errors import UsageError
from leanmoe.formats.quant_types import BY_NAME, QuantType


@dataclass(frozen=True, slots=True)
class Recipe:
    """A mixture: `base` for most matrices; `better` for the more sensitive ones of `often` chosen layers.

    `often` says which layers those are: "some" is the first and the last eighth and every third between; "first" is
    the first eighth for the FFN's down matrix and the first four layers for attention's values.
    """

    file_type: int
    base: str
    better: str = ""
    often: str = ""


_RECIPES: Mapping[str, Recipe] = {
    "f32": Recipe(0, "F32"),
    "f16": Recipe(1, "F16"),
    "bf16": Recipe(32, "BF16"),
    "q8_0": Recipe(7, "Q8_0"),
    "q6_k": Recipe(18, "Q6_K"),
    "q5_k_m": Recipe(17, "Q5_K", "Q6_K", "some"),
    "q5_k_s": Recipe(16, "Q5_K"),
    "q4_k_m": Recipe(15, "Q4_K", "Q6_K", "some"),
    "q4_k_s": Recipe(14, "Q4_K", "Q5_K", "first"),
    "q4_0": Recipe(2, "Q4_0"),
}
_ALIASES = {"q4_k": "q4_k_m", "q5_k": "q5_k_m"}
QUANTS = tuple(_RECIPES)
_FLOATS = ("F32", "F16", "BF16")
_ALWAYS_F32 = re.compile(
    r".*_norm\.weight|.*ffn_gate_inp(_shexp)?\.weight|.*ssm_conv1d\.weight|.*indexer\.(proj|attn_q_b|attn_k)\.weight"
)
_BLOCK = re.compile(r"blk\.(\d+)\.(.*)\.weight")
_VALUES = ("attn_v", "attn_kv_b", "attn_qkv")
# For a row that is not a whole number of 256-element blocks.
_NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a mixture must know of a tensor: torch `shape`, the type of its values, whether its type is settled."""

    shape: tuple[int, ...]
    found: QuantType
    encoded: bool = False


def find_recipe(name: str | None) -> Recipe | None:
    """The recipe called `name` (in any case), None for the checkpoint's own types. Raises `UsageError`."""
    if name is None:
        return None
    lower = name.lower()
    recipe = _RECIPES.get(_ALIASES.get(lower, lower))
    if recipe is None:
        raise UsageError(f"'{name}' is no quantisation that lean writes; known: {', '.join(QUANTS)}")
    return recipe


def storage_types(
    recipe: Recipe | None, tensors: Mapping[str, Shape], layers: int, experts: int
) -> dict[str, QuantType]:
    """The type of each of `tensors`, by name, of a model with so many layers and experts in each of them."""
    values = [name for name in tensors if (m := _BLOCK.fullmatch(name)) and m[2] in _VALUES]
    order = {name: index for index, name in enumerate(values)}
    tied = "output.weight" not in tensors
    types = {}
    for name, tensor in tensors.items():
        if tensor.encoded:
            types[name] = tensor.found
        elif len(tensor.shape) < 2 or not name.endswith(".weight") or _ALWAYS_F32.fullmatch(name):
            types[name] = BY_NAME["F32"]
        elif recipe is None:
            types[name] = tensor.found
        else:
            chosen = _chosen(recipe, name, order.get(name, -1), len(values), layers, experts, tied)
            types[name] = BY_NAME[_fitting(chosen, tensor.shape[-1])]
    return types


def _chosen(
    recipe: Recipe, name: str, value_index: int, value_count: int, layers: int, experts: int, tied: bool
) -> str:
    if recipe.base in _FLOATS or recipe.base == "Q8_0":
        return recipe.base
    if name == "output.weight" or (name == "token_embd.weight" and tied):
        return "Q6_K"
    match = _BLOCK.fullmatch(name)
    if match is None:
        return recipe.base
    layer, part = int(match[1]), match[2]
    if part in _VALUES:
        if experts == 8:
            return "Q8_0"
        better = value_index < 4 if recipe.often == "first" else _some(value_index, value_count)
    elif part.startswith("ffn_down"):
        better = layer < layers // 8 if recipe.often == "first" else _some(layer, layers)
    elif experts == 8 and part == "attn_k":
        return "Q8_0"
    elif experts == 8 and part == "attn_output" and recipe.base == "Q4_K":
        return "Q5_K"
    else:
        better = False
    return recipe.better if recipe.better and better else recipe.base


def _some(index: int, count: int) -> bool:
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


def _fitting(name: str, columns: int) -> str:
    """`name`, or what replaces it for rows of `columns` that are not whole blocks of it."""
    if columns % BY_NAME[name].block == 0:
        return name
    return _NARROW[name] if name in _NARROW and columns % 32 == 0 else "F16"
