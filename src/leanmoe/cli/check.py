"""What `lean pack` and `lean pull` ask of a model before hours of copying."""

from leanmoe.formats.gguf import GGUFFile
from leanmoe.models.registry import model_spec
from leanmoe.text import file_tokenizer


def check_model(gguf: GGUFFile) -> None:
    """Raises `UnsupportedError` or `FormatError`, naming the file, unless `lean run` can run this model's network and
    read its tokenizer."""
    file_tokenizer(gguf, model_spec(gguf).vocab)
