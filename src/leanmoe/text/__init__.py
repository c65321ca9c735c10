"""Text in and out: tokenizer, chat template, incremental detokenising and stop strings."""

from leanmoe.text.chat import ChatTemplate, Message
from leanmoe.text.detokenizer import Detokenizer
from leanmoe.text.files import file_template, file_tokenizer
from leanmoe.text.stop import StopMatcher
from leanmoe.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "Message",
    "StopMatcher",
    "Tokenizer",
    "file_template",
    "file_tokenizer",
]
