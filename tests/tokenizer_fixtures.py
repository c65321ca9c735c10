"""What the tokenizer's tests measure against: llama.cpp itself on small files written here, and real vocabularies.

`probe_metadata` is a vocabulary made to show where a text was cut: nearly every two neighbouring bytes merge unless
a cut lies between them.
"""

import atexit
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from model_fixtures import alone_in

CACHE = Path.home() / ".cache" / "leanmoe"
SDIST = "llama-cpp-python==0.3.36"
WIDTH = 32

# Sentences of many scripts, code, numbers, spaces, controls, emoji: what people paste into a prompt.
TEXTS = (
    "",
    " ",
    "   ",
    "Hello, world! It's 3:45 o'clock; we'll see, they've said, I'M, you'RE, he'D.",
    "The quick  brown   fox\tjumps\t\tover\n\nthe\r\n\r\nlazy \n dog.   \n",
    "def f(x: int) -> str:\n    return f\"{x:>10}\" if x != 0 else 'none'  # 100%\n\n\n\tpass\n",
    'for (int i = 0; i < 1000000; ++i) { a[i] += b->c * 0x7fFF; } // "quoted" \\n',
    "1 12 123 1234 12345 1234567890 3.14159 1,000,000 ½ ٣٤٥ १२३ Ⅷ ²",
    "Grüße aus Köln, naïve café, Ångström, Łódź, smörgåsbord, İstanbul, ŒUVRE, straße",
    "Привет, мир! Ёлка. Ελληνικά κείμενο. Հայերեն. ქართული.",
    "你好，世界！這是繁體字。日本語のテキストとカタカナ、漢字。한국어 문장입니다. 中文English混合123",
    "مرحبا بالعالم، كيف حالك؟ שלום עולם! हिन्दी में लिखा हुआ। বাংলা ভাষা। ไทย ภาษา",
    "👍🏽 👨‍👩‍👧‍👦 🇫🇷 🏳️‍🌈 ❤️ \u200d \ufe0f 😀😃😄",
    "e\u0301 a\u0308\u0323 \u0300start n\u0303o",
    "\x00\x01\x02\x1b[0m\x7f\x85\u00a0\u2003\u2028\u3000\u200b\ufeff",
    "CamelCaseWordsAndHTTPServer iPhone McDonald's XMLHttpRequest2 snake_case_name SCREAMING_CASE",
    "''' 'tis 'Twas don't DON'T 'S 's ' s x'y'z 'll'll it'sabout we'vEbeen I'mad they'REally",
    "https://example.org/path?q=1&r=%20#frag user@mail.example C:\\dir\\file.txt /usr/bin",
    "a\n\nb\n \n c\r\r\nd \r\n\t e\n",
    "!!! ??? ... --- === *** ### ~~~ `` $$ ^^ | <tag attr='1'/> {[()]}",
    "=================================================================",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    "𝒜𝓁𝑔 𐍈 𝟘𝟙𝟚 🜁 𠀀𠀁 ㊗ ﬁ Ⓐ ªº ǅ ʰ ꜱ",
    "\u1c89\ua7cb \U00010d40\U00010d4a \U0001fae9 \U0001cc00 new\U00016d40letters",
)

# One of each kind of character that some pre-tokenizer treats in its own way.
ALPHABET = (
    "aZsStTmMdDrReEvVlL09 '\n\r\t!/.,$+<^`|_-\\\"#()[]{}~&;:*=?@%"
    "\u00e9\u00c9\u01c5\u02b0\u00aa\u00df\u0130\u017f\u0436\u0416\u03b1\u4e00\u9fa5\u9fff\u3007\u3042\u30a2\u30fc"
    "\uac00\u1100\u0e01\u0e31\u0627\u064b\u0905\u093e\u0301\u0660\u00bd\u2167\u00b2\u00a0\u2003\u3000\u0085\u2028"
    "\u200b\u200d\ufe0f\u2026\u3002\uff0c\u3001\uff01\uff21\uff11\u00a7\u20ac\u2192\u00ab\u2019\u201c\u0000\u001f"
    "\u007f\u0964\u06d4\u060c\U0001f600\U0001d49c\U0001d7d8\U00020000\U0001fae9\u1c89\ue000\ufffd\U000e0001"
)


def byte_characters() -> list[str]:
    """The characters that stand for the bytes 0 to 255 in byte-level vocabularies."""
    table = bytes_to_unicode()
    return [table[byte] for byte in range(256)]


def bpe_metadata(tokens: list[str], merges: list[str], pre: str, **extra: Any) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer: three special tokens of different kinds follow `tokens`."""
    special = ["<|endoftext|>", "<|im_end|>", "<user token>", "<user>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + special,
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3, 4, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
        **extra,
    }


def probe_metadata(pre: str, *, backwards: bool = False) -> dict[str, Any]:
    """A vocabulary in which almost any two bytes that may stand side by side merge, unless a cut is between.

    Of "abc" either "ab" or "bc" merges; `backwards` turns their order round, so that the two together show all cuts.
    """
    byte = byte_characters()
    ascii_bytes = range(128)
    pairs = [
        *((a, b) for a in ascii_bytes for b in ascii_bytes),
        *((a, b) for a in ascii_bytes for b in range(0xC2, 0xF5)),
        *((a, b) for a in range(0x80, 0xC0) for b in ascii_bytes),
        *((a, b) for a in range(0x80, 0xC0) for b in range(0xC2, 0xF5)),
    ]
    if backwards:
        pairs.reverse()
    merges = [f"{byte[a]} {byte[b]}" for a, b in pairs]
    return bpe_metadata(byte + [byte[a] + byte[b] for a, b in pairs], merges, pre)


@cache
def probe_model(*, backwards: bool = False) -> Path:
    """A file with that vocabulary, made once; llama.cpp is told for each family that it is of that family."""
    folder = tempfile.TemporaryDirectory(prefix="probe-")
    atexit.register(folder.cleanup)
    return write_model(Path(folder.name) / "vocabulary.gguf", probe_metadata("default", backwards=backwards))


def trained_metadata(pre: str, size: int = 1500) -> dict[str, Any]:
    """A vocabulary trained on `TEXTS` without any cuts, so that it holds long tokens which cross words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return bpe_metadata(tokens, [" ".join(pair) for pair in model["merges"]], pre)


def sentencepiece_metadata(**extra: Any) -> dict[str, Any]:
    """A small SentencePiece vocabulary with ties, runs of spaces, and tokens that cross words."""
    pieces = [
        *(
            "▁",
            "▁▁",
            "▁▁▁▁",
            "a",
            "b",
            "c",
            "e",
            "h",
            "l",
            "o",
            "r",
            "t",
            "w",
            "é",
            "你",
            "好",
            "你好",
            "▁你",
        ),
        *(
            "aa",
            "aaa",
            "aaaa",
            "ab",
            "ba",
            "bab",
            "th",
            "he",
            "the",
            "▁t",
            "▁th",
            "▁the",
            "lo",
            "hel",
            "hello",
        ),
        *(
            "▁hello",
            "or",
            "wor",
            "▁w",
            "▁wor",
            "o▁w",
            "e▁",
            "ll",
            "llo",
            "oo",
            "ooo",
            "-",
            "--",
            "----",
            "\n\n",
        ),
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokens += ["<|im_end|>", "<user token>"]
    scores = [0.0] * 259 + [-float(rank // 3) for rank in range(len(pieces))] + [0.0, 0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [3, 4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **extra,
    }


def write_model(path: Path, metadata: Mapping[str, Any]) -> Path:
    """Writes a `llama` model of one all-zero layer around a tokenizer, so that llama.cpp loads it."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if not key.startswith("tokenizer."):
            continue
        if isinstance(value, bool | np.bool_):
            writer.add_bool(key, bool(value))
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int | np.integer):
            writer.add_uint32(key, int(value))
        else:
            writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else list(value))
    count = len(metadata["tokenizer.ggml.tokens"])
    writer.add_vocab_size(count)
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((count, WIDTH), np.float16))
    for norm in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{norm}.weight", np.ones(WIDTH, np.float32))
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{part}.weight", np.zeros((WIDTH, WIDTH), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_cpp_models() -> Path:
    """The folder of llama.cpp's own vocabularies and templates, fetched once through pip; skips if it cannot be."""
    folder = CACHE / SDIST.replace("==", "-") / "models"
    with alone_in(CACHE):
        if not folder.is_dir():
            _fetch_llama_cpp(folder.parent)
    return folder


def _fetch_llama_cpp(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python"]
    command += ["--dest", str(CACHE), SDIST]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = list(CACHE.glob("llama_cpp_python-*.tar.gz"))
    if done.returncode or not archives:
        pytest.skip(f"pip could not fetch {SDIST}: {done.stderr.strip()[-200:]}")
    partial = CACHE / f"{folder.name}.partial"
    with tarfile.open(archives[0]) as archive:
        for member in archive:
            name = member.name.partition("/vendor/llama.cpp/")[2]
            if name.startswith("models/") and member.isfile():
                member.name = name
                archive.extract(member, partial, filter="data")
    archives[0].unlink()
    partial.rename(folder)
