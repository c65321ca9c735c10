r"""How each tokenizer family cuts text into words before byte-pair merging, by the name in
`tokenizer.ggml.pre`.

A split is a chain of regular expressions: each is applied to the pieces that the one before it left, and both
the matches and what lies between them are pieces. The names, and which expressions belong to each, are those
that llama.cpp gives to GGUF files; the expressions are written for Oniguruma (the engine inside `tokenizers`)
so that they cut at the same places. Two things need care:

- llama.cpp classifies code points by Unicode 15.1, Oniguruma by a later version. A code point that is newer
  counts as unassigned in llama.cpp, hence `_NEWER` is taken out of every category.
- For `gpt-4o`, `tekken` and `minimax-m2` llama.cpp tells upper from lower case for A-Z and a-z alone: any
  other letter is both. Text split that way is what users of these files have been given, so it is kept.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from leanmoe.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The word split of one tokenizer family.

    `patterns` is the chain of expressions in Oniguruma syntax. `ignore_merges`: a word that is a token as a
    whole is taken as it is, whatever the merges say. `add_bos`: whether a BOS token is put first when the
    file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


# Letters, numbers, marks, punctuation and symbols that Unicode 16.0 added.
_NEWER = "".join(
    rf"\x{{{first:X}}}-\x{{{last:X}}}"
    for first, last in (
        *((0x897, 0x897), (0x1B4E, 0x1B4F), (0x1B7F, 0x1B7F), (0x1C89, 0x1C8A), (0x2427, 0x2429)),
        *((0x31E4, 0x31E5), (0xA7CB, 0xA7CD), (0xA7DA, 0xA7DC), (0x105C0, 0x105F3), (0x10D40, 0x10D65)),
        *((0x10D69, 0x10D85), (0x10D8E, 0x10D8F), (0x10EC2, 0x10EC4), (0x10EFC, 0x10EFC), (0x11380, 0x113E2)),
        *((0x116D0, 0x116E3), (0x11BC0, 0x11BE1), (0x11BF0, 0x11BF9), (0x11F5A, 0x11F5A), (0x13460, 0x143FA)),
        *((0x16100, 0x16139), (0x16D40, 0x16D79), (0x18CFF, 0x18CFF), (0x1CC00, 0x1CCF9), (0x1CD00, 0x1CEB3)),
        *((0x1E5D0, 0x1E5FF), (0x1F8B2, 0x1F8BB), (0x1F8C0, 0x1F8C1), (0x1FA89, 0x1FA89), (0x1FA8F, 0x1FA8F)),
        *((0x1FABE, 0x1FABE), (0x1FAC6, 0x1FAC6), (0x1FADC, 0x1FADC), (0x1FADF, 0x1FADF), (0x1FAE9, 0x1FAE9)),
        (0x1FBCB, 0x1FBEF),
    )
)
_HAN = "".join(
    rf"\x{{{first:X}}}-\x{{{last:X}}}"
    for first, last in (
        *((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)),
        *((0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0x2CEB0, 0x2EBEF), (0x2F800, 0x2FA1F)),
    )
)

_CONTRACTION = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s+(?!\S)|\s+"
_LINES_AND_SPACES = r"\s*[\r\n]+|" + _SPACES
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_UPPER = r"[\p{L}&&[^a-z]]"
_LOWER = r"[\p{L}&&[^A-Z]]"
_CASED_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _LINES_AND_SPACES
_ASCII_PUNCTUATION = r"!-/:-@\[-`{-~"


def _words(number: str, *, contraction: str = _CONTRACTION + "|") -> str:
    """The cl100k shape: contractions, words, numbers, runs of anything else, line ends and spaces."""
    return f"{contraction}{_WORD}|{number}|{_OTHER}|{_LINES_AND_SPACES}"


def _cased_words(number: str, contraction: str) -> str:
    """The o200k shape: words cut where lower case turns into upper case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{lead}{_UPPER}*{_LOWER}+{contraction}|{lead}{_UPPER}+{_LOWER}*{contraction}|{number}|{_CASED_OTHER}"
    )


def _without_newer(pattern: str) -> str:
    return re.sub(r"\\p\{([LNMPS])\}", rf"[\\p{{\1}}&&[^{_escape(_NEWER)}]]", pattern)


def _escape(replacement: str) -> str:
    return replacement.replace("\\", "\\\\")


_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷ"
    "ᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ"
    "-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
# The published list starts the last range at U+3000, which llama.cpp has turned into a plain space by then.
_DEEPSEEK_PUNCTUATION = r"!-/:-~！-／：-～‘-‟\x{3001}-。"
_DEEPSEEK_IDEOGRAPHS = r"[[一-龥ࠀ-一가-\x{D7FF}]&&[^\s]]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    rf"[{_ASCII_PUNCTUATION}][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|" + _LINES_AND_SPACES,
)
_QWEN35 = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _LINES_AND_SPACES
)
_KIMI = (
    rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+(?:{_CONTRACTION})?|\p{{N}}{{1,3}}|"
    rf"{_OTHER}|{_LINES_AND_SPACES}"
)
_SEED = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES_AND_SPACES}"
_EXAONE_MOE = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|"
    + _SPACES
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

# (names, chain, and what else the family implies)
_FAMILIES: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "default",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ),
    (
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert exaone4 mpt "
        "olmo jais trillion granite-docling",
        PreTokenizer((_GPT2,)),
    ),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_words(r"\p{N}{1,3}"),))),
    ("glm4 glm5", PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True)),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 bailingmoe bailingmoe2 "
        "llada-moe",
        PreTokenizer((_words(r"\p{N}"),)),
    ),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("ufakzeka", PreTokenizer((_words(r"\p{N}", contraction=""),))),
    ("laguna", PreTokenizer((r"[^\n]+|\n+", _words(r"\p{N}")))),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True)),
    ("seed-coder", PreTokenizer((_SEED,))),
    ("exaone-moe", PreTokenizer((_EXAONE_MOE,))),
    (
        "gpt-4o llama4 kanana2 talkie minimax-m2",
        PreTokenizer((_cased_words(r"\p{N}{1,3}", f"(?:{_CONTRACTION})?"),)),
    ),
    ("tekken", PreTokenizer((_cased_words(r"\p{N}", ""),), ignore_merges=True, add_bos=True)),
    ("kimi-k2", PreTokenizer((_KIMI,))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_DEEPSEEK3)),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                rf"\s?[{_DEEPSEEK_PUNCTUATION}]+",
                r"\s+\z",
                _DEEPSEEK_IDEOGRAPHS,
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_IDEOGRAPHS, r"\p{N}")),
    ),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: PreTokenizer(
        tuple(_without_newer(pattern) for pattern in family.patterns), family.ignore_merges, family.add_bos
    )
    for names, family in _FAMILIES
    for name in names.split()
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The word split called `name`. Raises `UnsupportedError`, listing the known names, if there is none."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedError(
            f"tokenizer.ggml.pre is {name!r}, a pre-tokenizer that is not supported; known ones: {known}"
        ) from None
