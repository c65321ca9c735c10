"""Every tokenizer family and every published vocabulary against llama.cpp. Slow: each takes half a second."""

from pathlib import Path

import pytest

import tokenizer_fixtures as fixtures
from leanmoe.formats.gguf import read_gguf
from leanmoe.text import Tokenizer
from leanmoe.text.pretokenizers import PRE_TOKENIZERS
from oracles.llama_cpp import Vocabulary
from test_tokenizer import assert_same_as_llama_cpp, fuzz

pytestmark = pytest.mark.slow

VOCABULARIES = (
    *("aquila", "baichuan", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "gpt-neox"),
    *("llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder", "gemma-4"),
)
# Code points around every border at which a category begins or a special rule of a family applies.
_BLOCKS = (
    *((0, 0x3400), (0x4DB0, 0x4E10), (0x9F90, 0xAC10), (0xD7A0, 0xD800), (0xE000, 0xE010), (0xF8F0, 0x12000)),
    *((0x13400, 0x14400), (0x16000, 0x17010), (0x18CD0, 0x18D10), (0x1B000, 0x20010), (0x2A6D0, 0x2B750)),
    *((0x2EBD0, 0x2EC00), (0x2F7F0, 0x30010), (0x323A0, 0x323C0), (0xE0000, 0xE0200)),
)


@pytest.fixture(scope="session")
def models() -> Path:
    return fixtures.llama_cpp_models()


@pytest.mark.parametrize("backwards", [False, True], ids=["", "backwards"])
@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_family_cuts_text_where_llama_cpp_does(pre: str, backwards: bool) -> None:
    """A model of this family would be fed ids that it was not trained on."""
    texts = [*fixtures.TEXTS, *fuzz(200, seed=3)]
    metadata = fixtures.probe_metadata(pre, backwards=backwards)
    assert_same_as_llama_cpp(metadata, fixtures.probe_model(backwards=backwards), texts, pre)


@pytest.mark.parametrize("pre", ["qwen35", "llama-bpe", "gpt-2", "kimi-k2", "deepseek-v3", "deepseek-llm"])
def test_every_kind_of_code_point_is_classified_as_llama_cpp_does(pre: str) -> None:
    """Unicode tables of different ages would give rare scripts and new emoji other ids."""
    tokenizer = Tokenizer.from_metadata(fixtures.probe_metadata(pre))
    points = [point for first, last in _BLOCKS for point in range(first, last)]
    with Vocabulary(fixtures.probe_model(), pre=pre) as oracle:
        for start in range(0, len(points), 200):
            characters = map(chr, points[start : start + 200])
            text = "".join(f"a{c}a1{c}1 {c}{c}!{c}\n" for c in characters)
            assert tokenizer.encode(text) == oracle.tokenize(text), f"U+{points[start]:04X} and the 200 after"


@pytest.mark.parametrize("name", VOCABULARIES)
def test_real_vocabulary_gives_the_ids_of_llama_cpp(name: str, models: Path, tmp_path: Path) -> None:
    """Real merges and special tokens, on real text and on random text."""
    metadata = read_gguf(models / f"ggml-vocab-{name}.gguf").metadata
    # A file without the model's name: by it llama.cpp drops spaces after some tokens of Phi-3.
    file = fixtures.write_model(tmp_path / "vocabulary.gguf", metadata)
    specials = (
        "<|im_end|>",
        "<|endoftext|>",
        "</s>",
        "<s>",
        "<unk>",
        "<0x41>",
        "<|eot_id|>",
        "<fim_pad>",
        "\n\n",
        "   ",
    )
    texts = [*fixtures.TEXTS, *fuzz(200, seed=4, specials=specials)]
    assert_same_as_llama_cpp(metadata, file, texts)


@pytest.mark.parametrize(
    "name", [name for name in VOCABULARIES if name not in ("aquila", "baichuan", "gpt-neox")]
)
def test_real_vocabulary_gives_the_recorded_ids(name: str, models: Path) -> None:
    """The ids that llama.cpp records beside its vocabularies, made with the original tokenizers."""
    path = models / f"ggml-vocab-{name}.gguf"
    tokenizer = Tokenizer.from_metadata(read_gguf(path).metadata)
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    recorded = [
        [int(token) for token in line.split()] for line in Path(f"{path}.out").read_text().split("\n")
    ]
    assert len(texts) > 40
    if len(recorded) > len(texts) and not recorded[-1]:
        recorded.pop()  # the last line has an end, in some files
    assert [tokenizer.encode(text, parse_special=False, add_special=False) for text in texts] == recorded


def test_smollm2_gives_the_ids_of_llama_cpp(smollm2_gguf: Path) -> None:
    """The demo's own tokenizer, loaded by llama.cpp from the very same file."""
    tokenizer = Tokenizer.from_metadata(read_gguf(smollm2_gguf).metadata)
    with Vocabulary(smollm2_gguf) as oracle:
        for text in [*fixtures.TEXTS, *fuzz(300, seed=5)]:
            for special in (False, True):
                ids = tokenizer.encode(text, parse_special=special, add_special=special)
                assert ids == oracle.tokenize(text, parse_special=special, add_special=special), ascii(text)
            assert not ids or tokenizer.decode(ids) == oracle.text(ids)
