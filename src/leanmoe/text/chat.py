"""Messages to prompt text, through the chat template that comes with the model."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables

from leanmoe.errors import FormatError, UsageError
from leanmoe.text.sandbox import Meter, TemplateEnvironment, TemplateRefusal
from leanmoe.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""`role` and `content` (text, or a list of `{"type": "text", "text": ...}` parts), and whatever else the
model's template reads, such as `tool_calls`."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Whose words a message may be."""

# What templates call the switch for thinking: most of them; DeepSeek-V3.1 and Kimi.
_THINKING = ("enable_thinking", "thinking")
_KEY = "tokenizer.chat_template"
_MAX_TEMPLATE = 1 << 20
_MAX_PROMPT = 16 << 20


class ChatTemplate:
    """One compiled template; `render` may be called from several threads."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> None:
        """`special_tokens` are variables such as `bos_token`; `tool_source` is used when tools are given.

        Raises `FormatError` when a source is not a valid template.
        """
        environment = TemplateEnvironment()
        self._special_tokens = dict(special_tokens)
        self._template = _compile(environment, source)
        self._variables = find_undeclared_variables(environment.parse(source))
        self._tool_template = _compile(environment, tool_source) if tool_source is not None else None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> "ChatTemplate":
        """The template of a GGUF file (`tokenizer.chat_template`, and `.tool_use` beside it if there is one).

        Raises `UsageError` when the file has none and `FormatError` when it cannot be parsed.
        """
        source = metadata.get(_KEY)
        if source is None:
            raise UsageError(
                "this model has no chat template (tokenizer.chat_template), so it may not be made for "
                "chatting; use plain completion instead (`lean run -p`, `LLM.generate`)"
            )
        tool_source = metadata.get(f"{_KEY}.tool_use")
        for found in (source, tool_source):
            if found is not None and not isinstance(found, str):
                raise FormatError(f"{_KEY} is {type(found).__name__}; wanted text")
        return cls(source, _special_tokens(metadata, tokenizer), tool_source)

    def thinking_off(self) -> dict[str, bool]:
        """The variables for `render` by which the model answers without thinking first.

        Raises `UsageError` if the template has no such switch.
        """
        switches = dict.fromkeys(self._variables.intersection(_THINKING), False)
        if not switches:
            raise UsageError("the model's chat template has no switch for thinking")
        return switches

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for `messages`; encode it with `Tokenizer.encode_rendered`.

        `variables` are handed to the template as they are (`tools`, `enable_thinking`, ...). What a message
        says is put into the text as it stands: special tokens spelt out in it become tokens, as in llama.cpp.
        Raises `UsageError` for malformed messages, for messages that the template refuses, and for a template
        that does too much.
        """
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise UsageError(f"messages is {messages!r}; wanted a list of objects with `role` and `content`")
        if not messages:
            raise UsageError("there are no messages; give at least one")
        template = self._template
        if variables.get("tools") and self._tool_template is not None:
            template = self._tool_template
        given = {
            "messages": [_checked(message, index) for index, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **copy.deepcopy(variables),
        }
        pieces: list[str] = []
        size = 0
        try:
            with Meter():
                for piece in template.generate(given):
                    size += len(piece)
                    if size > _MAX_PROMPT:
                        raise UsageError(
                            f"the model's chat template writes more than {_MAX_PROMPT:,} characters"
                        )
                    pieces.append(piece)
        except TemplateRefusal as error:
            raise UsageError(f"the model's chat template refuses these messages: {error}") from error
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise UsageError(f"the model's chat template failed on these messages: {error}") from error
        except RecursionError as error:
            raise UsageError("the model's chat template calls itself without end; it was stopped") from error
        return "".join(pieces)


def _compile(environment: TemplateEnvironment, source: str) -> Any:
    if len(source) > _MAX_TEMPLATE:
        raise FormatError(f"{_KEY} is {len(source):,} characters long; {_MAX_TEMPLATE:,} is the most")
    try:
        return environment.from_string(source)
    except (TemplateError, RecursionError, SyntaxError, ValueError, OverflowError) as error:
        raise FormatError(f"{_KEY} is not a valid template: {error}") from error


def _special_tokens(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """`bos_token` and `eos_token` (empty where the file has none), and the others that the file names."""
    texts = {
        "bos_token": "" if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
        "eos_token": "" if tokenizer.eos_id is None else tokenizer.token_text(tokenizer.eos_id),
    }
    for variable, key in (("unk_token", "unknown"), ("pad_token", "padding"), ("sep_token", "seperator")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and 0 <= int(token) < tokenizer.vocab_size:
            texts[variable] = tokenizer.token_text(int(token))
    return texts


def _checked(message: Message, index: int) -> dict[str, Any]:
    """A copy of a message with its parts joined, or `UsageError` saying what is wrong with it."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} is {message!r}; wanted an object with `role` and `content`")
    role = message.get("role")
    if role not in ROLES:
        raise UsageError(f"{where}.role is {role!r}; wanted one of {', '.join(ROLES)}")
    copied = copy.deepcopy(dict(message))
    content = copied.get("content")
    if isinstance(content, str):
        return copied
    if content is None:
        if role == "assistant":
            return {**copied, "content": ""}
        raise UsageError(f"{where} has no content; wanted text")
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise UsageError(f"{where}.content is {content!r}; wanted text or a list of text parts")
    parts = [_part(part, f"{where}.content[{at}]") for at, part in enumerate(content)]
    return {**copied, "content": "\n".join(parts)}


def _part(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UsageError(f"{where} is a part of type {kind!r}; this model takes text parts only")
