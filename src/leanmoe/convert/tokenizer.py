"""A checkpoint's tokenizer as `tokenizer.*` keys of a GGUF.

The word split of a byte-level tokenizer gets the name under which GGUF files know it: the one that cuts a probing text
into the same words as the checkpoint's own. SentencePiece vocabularies are taken from `tokenizer.model` if it is there.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, pre_tokenizers

from leanmoe.convert.config import Config
from leanmoe.convert.sentencepiece_model import read_pieces
from leanmoe.errors import FormatError, UnsupportedError
from leanmoe.formats.gguf_values import Value
from leanmoe.formats.safetensors import read_json
from leanmoe.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_SPACE = "\u2581"
# Cuts where families differ: case, digits, contractions, line ends, marks, scripts. The second has no letters whose
# case only some families see.
_PROBES = (
    "We'll SEE 12345 xFooBarBAZ it's I'VE a1b22c333\n\n\n  two   spaces\t\ttabs \r\n"
    "(x+=1)//foo/bar!!\n\n/ #!@$%^&* _a_ \n x 日本語のテキスト中文123 한국어 क्षेत्र e\u0301a ÉCOLEÉcole "
    "straßeΣΑΣ ʼn…“q” 𝟙²½\n x",
    "We'll SEE 12345 xFooBarBAZ it's I'VE a1b22c333\n\n\n  two   spaces\t\ttabs \r\n"
    "(x+=1)//foo/bar!!\n\n/ #!@$%^&* _a_ \n x",
)
_SPECIAL_SHAPE = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_BYTE_SHAPE = re.compile("<0x[0-9A-F]{2}>")
# Control tokens in the tokenizer of Gemma 4 that a reader of its answers must see.
_VISIBLE = frozenset(
    (
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        '<|"|>',
    )
)
_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


@dataclass(slots=True)
class _Vocabulary:
    """Tokens by id, with their kinds and scores, while they are put together."""

    tokens: list[str] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def put(self, token: int, text: str, kind: int, score: float = 0.0) -> None:
        if not 0 <= token < 1 << 22:
            raise FormatError(
                f"the tokenizer's token {text[:80]!r} has the id {token}, which no vocabulary reaches"
            )
        self.pad(token + 1)
        self.tokens[token], self.kinds[token], self.scores[token] = text, kind, score

    def pad(self, size: int) -> None:
        for token in range(len(self.tokens), size):
            self.tokens.append(f"[PAD{token}]")
            self.kinds.append(UNUSED)
            self.scores.append(-1e4)


def tokenizer_metadata(folder: Path, config: Config, pre: Sequence[str]) -> dict[str, Value]:
    """The keys for the tokenizer in `folder`; `pre` are the word splits to try first.

    Raises `UsageError` if there is no tokenizer, `UnsupportedError` for a kind that GGUF has no name for.
    """
    settings_path, model_path, json_path = (
        folder / name for name in ("tokenizer_config.json", "tokenizer.model", "tokenizer.json")
    )
    settings = read_json(settings_path) if settings_path.exists() else {}
    document = read_json(json_path) if json_path.exists() or not model_path.exists() else {}
    vocabulary = _Vocabulary()
    model = document.get("model") or {}
    if model and not isinstance(model, dict):
        raise FormatError(f"{json_path}: 'model' is no object")
    if model.get("type") == "BPE" and model.get("byte_fallback") and "gemma4" in pre:
        keys = _by_character(vocabulary, model, json_path)
    elif model_path.exists() and (not model or model.get("byte_fallback")):
        keys = _sentencepiece(vocabulary, read_pieces(model_path))
    elif model.get("type") in (None, "BPE") and model.get("byte_fallback"):
        keys = _sentencepiece_from_json(vocabulary, model, json_path)
    elif model.get("type") == "BPE":
        keys = _byte_level(vocabulary, model, json_path, pre)
    else:
        raise UnsupportedError(
            f"{json_path}: a tokenizer of kind {model.get('type')!r} is not supported; supported: BPE"
        )
    _add_added_tokens(vocabulary, document, settings, json_path)
    vocabulary.pad(config.integer("vocab_size", default=0))
    keys |= {
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": vocabulary.kinds,
    }
    if keys["tokenizer.ggml.model"] != "gpt2":
        keys["tokenizer.ggml.scores"] = vocabulary.scores
    return keys | _special_ids(vocabulary, folder, config, settings, document) | _templates(folder, settings)


def _byte_level(
    vocabulary: _Vocabulary, model: Mapping[str, Any], path: Path, pre: Sequence[str]
) -> dict[str, Value]:
    merges = _merges(vocabulary, model, path)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _word_split(path, bool(model.get("ignore_merges")), pre),
        "tokenizer.ggml.merges": merges,
    }


def _by_character(vocabulary: _Vocabulary, model: Mapping[str, Any], path: Path) -> dict[str, Value]:
    """Gemma 4: merges on characters, and tokens for single bytes. Readers that want scores find zeros."""
    merges = _merges(vocabulary, model, path)
    unknown = model.get("unk_token")
    for token, text in enumerate(vocabulary.tokens):
        if text == unknown:
            vocabulary.kinds[token] = UNKNOWN
        elif _BYTE_SHAPE.fullmatch(text):
            vocabulary.kinds[token] = BYTE
    return {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}


def _merges(vocabulary: _Vocabulary, model: Mapping[str, Any], path: Path) -> list[str]:
    """Fills the vocabulary and returns the merges, "left right" in order of rank."""
    try:
        for text, token in model["vocab"].items():
            vocabulary.put(token, text, NORMAL)
        return [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(f"{path}: its BPE model is malformed: {error!r}") from None


def _word_split(path: Path, ignore_merges: bool, preferred: Sequence[str]) -> str:
    """The name of the family that cuts the probing text into the words that the tokenizer in `path` makes of it."""
    try:
        own = tokenizers.Tokenizer.from_file(str(path)).pre_tokenizer
    except Exception as error:  # the library raises plain Exception
        raise FormatError(f"{path}: cannot be read as a tokenizer: {error}") from None
    if own is None:
        raise UnsupportedError(f"{path}: has no word split; one that GGUF has a name for was wanted")
    names = [*dict.fromkeys([*(name for name in preferred if name in PRE_TOKENIZERS), *PRE_TOKENIZERS])]
    for probe in _PROBES:
        words = [word for word, _ in own.pre_tokenize_str(probe)]
        found = [name for name in names if _words(PRE_TOKENIZERS[name], probe) == words]
        same = [name for name in found if PRE_TOKENIZERS[name].ignore_merges == ignore_merges]
        for name in (*(n for n in found if n in preferred), *same, *found):
            return name
    raise UnsupportedError(
        f"{path}: splits text into words in a way that no GGUF name stands for; its family is not one of the "
        f"{len(PRE_TOKENIZERS)} that are known"
    )


def _words(family: PreTokenizer, text: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in family.patterns]
    chain = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return [word for word, _ in chain.pre_tokenize_str(text)]


def _sentencepiece(vocabulary: _Vocabulary, pieces: Iterator[tuple[str, float, int]]) -> dict[str, Value]:
    for token, (text, score, kind) in enumerate(pieces):
        vocabulary.put(token, text, kind, score)
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}


def _sentencepiece_from_json(
    vocabulary: _Vocabulary, model: Mapping[str, Any], path: Path
) -> dict[str, Value]:
    """Scores that give the merges their order: the piece that an earlier merge makes scores higher."""
    try:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        ranks: dict[str, int] = {}
        for rank, (left, right) in enumerate(pairs):
            ranks.setdefault(left + right, rank)
        unknown = model.get("unk_token")
        for text, token in model["vocab"].items():
            kind = UNKNOWN if text == unknown else BYTE if _BYTE_SHAPE.fullmatch(text) else NORMAL
            vocabulary.put(token, text, kind, -float(ranks.get(text, len(ranks))))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(f"{path}: its BPE model is malformed: {error!r}") from None
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}


def _add_added_tokens(
    vocabulary: _Vocabulary, document: Mapping[str, Any], settings: Mapping[str, Any], path: Path
) -> None:
    try:
        added = {entry["id"]: entry for entry in document.get("added_tokens") or ()}
        for token, entry in (settings.get("added_tokens_decoder") or {}).items():
            added.setdefault(int(token), entry)
        for token, entry in sorted(added.items()):
            text, special = entry["content"], bool(entry.get("special"))
            text.encode()  # a string, and one that can be written
            if token < len(vocabulary.kinds) and vocabulary.kinds[token] in (UNKNOWN, BYTE):
                continue
            control = (special or _SPECIAL_SHAPE.fullmatch(text)) and text not in _VISIBLE
            kind = CONTROL if control else USER_DEFINED
            vocabulary.put(token, text, kind)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(f"{path}: its added tokens are malformed: {error!r}") from None


def _special_ids(
    vocabulary: _Vocabulary,
    folder: Path,
    config: Config,
    settings: Mapping[str, Any],
    document: Mapping[str, Any],
) -> dict[str, Value]:
    """Ids by the token's text in the tokenizer's settings, else by number in the model's configuration."""
    ids = {text: token for token, text in enumerate(vocabulary.tokens)}
    generation = folder / "generation_config.json"
    numbers = {**(read_json(generation) if generation.exists() else {}), **config.values}
    keys: dict[str, Value] = {}
    for theirs, ours in _IDS.items():
        text = settings.get(f"{theirs}_token")
        text = text.get("content") if isinstance(text, dict) else text
        number = numbers.get(f"{theirs}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        token = ids.get(text) if isinstance(text, str) else number
        if type(token) is int and 0 <= token < len(vocabulary.tokens):
            keys[f"tokenizer.ggml.{ours}_token_id"] = token
    for name in ("bos", "eos"):
        adds = _adds(settings, document, name)
        if adds is not None:
            keys[f"tokenizer.ggml.add_{name}_token"] = adds
    if isinstance(settings.get("add_prefix_space"), bool):
        keys["tokenizer.ggml.add_space_prefix"] = settings["add_prefix_space"]
    return keys


def _adds(settings: Mapping[str, Any], document: Mapping[str, Any], name: str) -> bool | None:
    """Whether BOS or EOS is put around a text: what the post-processor does, or else what the settings say."""
    try:
        processors = [document.get("post_processor") or {}]
        processors += processors[0].get("processors", [])
        for processor in processors:
            if processor.get("type") == "TemplateProcessing":
                single = processor.get("single") or [{}]
                return "SpecialToken" in single[0 if name == "bos" else -1]
    except (AttributeError, LookupError, TypeError) as error:
        raise FormatError(f"tokenizer.json: its post_processor is malformed: {error!r}") from None
    value = settings.get(f"add_{name}_token")
    return value if isinstance(value, bool) else False if document else None


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, Value]:
    """The chat templates, from a file of their own or from the tokenizer's settings."""
    found = settings.get("chat_template")
    alone, in_json = folder / "chat_template.jinja", folder / "chat_template.json"
    if in_json.exists():
        found = read_json(in_json).get("chat_template", found)
    if alone.exists():
        try:
            found = alone.read_text(encoding="utf-8")
        except ValueError as error:
            raise FormatError(f"{alone}: is no text: {error}") from None
    if isinstance(found, str):
        return {"tokenizer.chat_template": found}
    if not isinstance(found, list | None):
        raise FormatError(
            f"{folder / 'tokenizer_config.json'}: chat_template is {str(found)[:80]!r}; text, or a list of named ones, "
            "was wanted"
        )
    named = {
        entry["name"]: entry["template"]
        for entry in found or ()
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }
    keys: dict[str, Value] = {}
    if "default" in named:
        keys["tokenizer.chat_template"] = named.pop("default")
    if named:
        keys["tokenizer.chat_templates"] = sorted(named)
    return keys | {f"tokenizer.chat_template.{name}": text for name, text in named.items()}
