"""Which type each tensor gets, by llama-quantize's rules for the mixtures that files are published in."""

from collections.abc import Callable

from leanmoe.bench.random_model.networks import Network

_MIDDLE = ("attn_v.weight", "attn_kv_b.weight", "attn_qkv.weight")
# What takes the place of a type whose blocks of 256 do not divide a row; a row no whole number of 32 is F16.
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_FILE_TYPES = {"q4_k_m": 15, "q8_0": 7, "mxfp4": 38, "f32": 0}
MIXTURES = tuple(_FILE_TYPES)


def file_type(mixture: str) -> int:
    """The number of a mixture in `general.file_type`."""
    return _FILE_TYPES[mixture]


def choose_types(made: Network, mixture: str) -> dict[str, str]:
    """The type of each tensor, as llama-quantize chooses it for `mixture`, one of `MIXTURES`."""
    choose: Callable[[str, tuple[int, ...]], str]
    if mixture == "q4_k_m":
        choose = _q4_k_m(made)
    elif mixture == "mxfp4":
        choose = lambda name, ne: "MXFP4" if len(ne) > 2 else "Q8_0"  # noqa: E731
    else:
        choose = lambda name, ne: mixture.upper()  # noqa: E731
    return {
        name: "F32" if _stays_float(name, ne) else _fitting(choose(name, ne), ne[0])
        for name, ne in made.tensors
    }


def _stays_float(name: str, ne: tuple[int, ...]) -> bool:
    kept = ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d.weight")
    return len(ne) < 2 or not name.endswith(".weight") or name.endswith(kept)


def _fitting(kind: str, columns: int) -> str:
    block = 256 if kind in _FALLBACK else 1 if kind == "F32" else 32
    if columns % block == 0:
        return kind
    return "F16" if columns % 32 else _FALLBACK[kind]


def _q4_k_m(made: Network) -> Callable[[str, tuple[int, ...]], str]:
    n = made.blocks
    eight = made.shape.experts == 8
    middle = [name for name, _ in made.tensors if name.endswith(_MIDDLE)]
    places = {name: index for index, name in enumerate(middle)}

    def choose(name: str, ne: tuple[int, ...]) -> str:
        if name == "output.weight":
            return "Q6_K"
        if name in places:
            return "Q8_0" if eight else "Q6_K" if _more_bits(places[name], len(places)) else "Q4_K"
        if ".ffn_down" in name:
            return "Q6_K" if _more_bits(int(name.split(".")[1]), n) else "Q4_K"
        if eight and name.endswith("attn_k.weight"):
            return "Q8_0"
        return "Q5_K" if eight and name.endswith("attn_output.weight") else "Q4_K"

    return choose


def _more_bits(index: int, count: int) -> bool:
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2
