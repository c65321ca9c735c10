"""The vocabulary in a model file's metadata: token texts, kinds, special ids and stop tokens, all checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt

from leanmoe.errors import FormatError


class Kind(IntFlag):
    """What a token is. Flags: one that ends generation is control whatever else the file says of it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 4
    USER_DEFINED = 8
    UNUSED = 16
    BYTE = 32


# `tokenizer.ggml.token_type` -> Kind; 0 (undefined) and anything else have no kind and no text.
_KIND_BY_TYPE = np.zeros(256, dtype=np.uint8)
_KIND_BY_TYPE[1:7] = [
    Kind.NORMAL,
    Kind.UNKNOWN,
    Kind.CONTROL,
    Kind.USER_DEFINED,
    Kind.UNUSED,
    Kind.BYTE,
]

# Ends of generation are known by their text (as in llama.cpp), since few files list them all by id.
_END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>"),
    *("<｜end▁of▁sentence｜>", "[e~["),
)
# Fill-in-the-middle tokens: texts by which each is found where the file does not give its id.
_FIM_TEXTS: Mapping[str, tuple[str, ...]] = {
    "pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "sep": ("<|file_sep|>",),
}
_FIM_LEGACY = {"pre": "prefix", "suf": "suffix", "mid": "middle"}
_FIM_STOPS = ("pad", "rep", "sep")
# gpt-oss marks the parts of its answers with these; they are text for whoever parses the answer.
_VISIBLE_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


class Texts:
    """Token texts as one run of bytes: a hundred thousand strings take six times as much."""

    def __init__(self, texts: Sequence[str]) -> None:
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        self._bytes = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, token: int) -> str:
        begin, end = self._ends[token : token + 2].tolist()
        return self._bytes[begin:end].decode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token texts and kinds of one model; ids are positions in `tokens`.

    `kinds` is uint8 (`Kind` flags), `scores` float32 (zeros where the file has none). `stop_ids` are the
    tokens that end generation. `special_order` lists the tokens to be found in text before anything else, in
    that order.
    """

    tokens: Texts
    kinds: npt.NDArray[np.uint8]
    scores: npt.NDArray[np.float32]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    stop_ids: frozenset[int]
    special_order: tuple[int, ...]

    def is_kind(self, token: int, kind: Kind) -> bool:
        """Whether `token` has any of the flags of `kind`."""
        return bool(int(self.kinds[token]) & kind)


def metadata_bool(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    """A boolean of the metadata. Raises `FormatError` when the key holds anything else."""
    value = metadata.get(key, default)
    if not isinstance(value, bool | np.bool_):
        raise FormatError(f"{key} is {value!r}; wanted true or false")
    return bool(value)


def metadata_strings(metadata: Mapping[str, Any], key: str) -> Sequence[str]:
    """An array of strings of the metadata. Raises `FormatError` when it is missing or is anything else."""
    value = metadata.get(key)
    if value is None:
        raise FormatError(f"{key} is missing: the file has no tokenizer that can be used")
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise FormatError(f"{key} is a {type(value).__name__}; wanted an array of strings")
    strings = list(value)
    for index, item in enumerate(strings):
        if not isinstance(item, str):
            raise FormatError(f"{key}[{index}] is {item!r}; wanted a string")
    return strings


def read_vocabulary(
    metadata: Mapping[str, Any], default_ids: Mapping[str, int]
) -> tuple[Vocabulary, dict[str, int]]:
    """Reads and checks `tokenizer.ggml.*`; also the id of each text, which takes much memory and few need for long.

    `default_ids` holds the bos, eos and unknown ids of a tokenizer family for files that do not name them.
    Raises `FormatError` for missing, mistyped, mis-sized or contradictory entries.
    """
    tokens = [
        text or f"[EMPTY_{index}]"
        for index, text in enumerate(metadata_strings(metadata, "tokenizer.ggml.tokens"))
    ]
    if not tokens:
        raise FormatError("tokenizer.ggml.tokens is empty; wanted at least one token")
    ids = {text: index for index, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        first = next(index for index, text in enumerate(tokens) if ids[text] != index)
        raise FormatError(
            f"tokenizer.ggml.tokens lists {tokens[first]!r} as {first} and as {ids[tokens[first]]}; "
            "wanted each text once"
        )
    kinds = _kinds(metadata, len(tokens))
    specials = _special_ids(metadata, ids, default_ids)
    stop_ids = _stop_ids(tokens, ids, kinds, specials)
    marked = Kind.CONTROL | Kind.USER_DEFINED | Kind.UNKNOWN
    special_order = sorted(
        np.flatnonzero(kinds & np.uint8(marked)).tolist(),
        key=lambda token: -len(tokens[token].encode(errors="replace")),
    )
    vocabulary = Vocabulary(
        tokens=Texts(tokens),
        kinds=kinds,
        scores=_scores(metadata, len(tokens)),
        bos_id=specials.named["bos"],
        eos_id=specials.named["eos"],
        unknown_id=specials.named["unknown"],
        stop_ids=stop_ids,
        special_order=tuple(special_order),
    )
    return vocabulary, ids


def _array(metadata: Mapping[str, Any], key: str, count: int, wanted: str) -> npt.NDArray[Any] | None:
    value = metadata.get(key)
    if value is None:
        return None
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in wanted:
        raise FormatError(f"{key} is not an array of numbers of the right type")
    if len(array) != count:
        raise FormatError(f"{key} has {len(array)} entries for {count} tokens; wanted one for each")
    return array


def _kinds(metadata: Mapping[str, Any], count: int) -> npt.NDArray[np.uint8]:
    types = _array(metadata, "tokenizer.ggml.token_type", count, "iu")
    if types is None:
        return np.full(count, Kind.NORMAL, dtype=np.uint8)
    return np.take(_KIND_BY_TYPE, np.where((types < 0) | (types > 255), 0, types))


def _scores(metadata: Mapping[str, Any], count: int) -> npt.NDArray[np.float32]:
    scores = _array(metadata, "tokenizer.ggml.scores", count, "iuf")
    if scores is None:
        return np.zeros(count, dtype=np.float32)
    if not np.isfinite(scores).all():
        raise FormatError("tokenizer.ggml.scores has an entry that is not a finite number")
    return scores.astype(np.float32)


@dataclass(frozen=True, slots=True)
class _SpecialIds:
    """Ids that the metadata names or the family implies, and fill-in-the-middle ids, some found by text."""

    named: Mapping[str, int | None]
    fim: Mapping[str, int]
    fim_by_text: frozenset[int]


def _special_ids(
    metadata: Mapping[str, Any], ids: Mapping[str, int], default_ids: Mapping[str, int]
) -> _SpecialIds:
    count = len(ids)
    named = {name: _id(metadata, name, count) for name in ("bos", "eos", "unknown", "eot", "eom")}
    for name, default in default_ids.items():
        if named[name] is None and default < count:
            named[name] = default
    fim: dict[str, int] = {}
    by_text: set[int] = set()
    for name, texts in _FIM_TEXTS.items():
        found = _id(metadata, f"fim_{name}", count)
        if found is None and name in _FIM_LEGACY:
            found = _id(metadata, _FIM_LEGACY[name], count)
        if found is None and (known := [ids[text] for text in texts if text in ids]):
            found = min(known)
            by_text.add(found)
        if found is not None:
            fim[name] = found
    return _SpecialIds(named, fim, frozenset(by_text))


def _id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise FormatError(f"{key} is {value!r}; wanted a token id")
    if not 0 <= value < count:
        raise FormatError(f"{key} is {value}; the vocabulary has {count} tokens")
    return int(value)


def _stop_ids(
    tokens: Sequence[str], ids: Mapping[str, int], kinds: npt.NDArray[np.uint8], specials: _SpecialIds
) -> frozenset[int]:
    """The ends of generation; marks in `kinds` what they, and tokens known by their text, really are."""
    stops = {specials.fim[name] for name in _FIM_STOPS if name in specials.fim}
    by_text = {ids[text] for text in _END_TEXTS if text in ids}
    forced = by_text | specials.fim_by_text
    kinds[sorted(forced)] |= np.uint8(Kind.CONTROL)
    stops |= by_text
    for text in _VISIBLE_TEXTS:
        if text in ids:
            kinds[ids[text]] = Kind.USER_DEFINED
    named = [specials.named[name] for name in ("eos", "eot", "eom")]
    stops |= {token for token in named if token is not None}

    present = {tokens[token] for token in stops}
    called = "<|call|>" in present or "<|calls|>" in present
    if "<|end|>" in present and called and ("<|return|>" in present or "<|flush|>" in present):
        # These models end each part of an answer with <|end|> and go on.
        stops.remove(ids["<|end|>"])
        kinds[ids["<|end|>"]] = Kind.USER_DEFINED
    if "<|tool_response>" in present and "</s>" in present:
        stops.remove(ids["</s>"])
        kinds[ids["</s>"]] = Kind.NORMAL
    return frozenset(stops)
