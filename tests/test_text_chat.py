"""Chat templates: the prompt that the model's authors meant, from a template that nobody vouches for."""

from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

import tokenizer_fixtures as fixtures
from leanmoe.errors import FormatError, UsageError
from leanmoe.formats.gguf import read_gguf
from leanmoe.text import ChatTemplate, Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather, <é>",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one question": ([{"role": "user", "content": 'Hi <there> "é" 你好'}], {}),
    "several turns": (
        [
            {"role": "system", "content": "Be brief.\n"},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "<think>x</think>Hello!"},
            {"role": "user", "content": " And? "},
        ],
        {},
    ),
    "no thinking": ([{"role": "user", "content": "Hi"}], {"enable_thinking": False}),
    "tools": ([{"role": "user", "content": "Weather?"}], {"tools": TOOLS}),
    "tool call": (
        [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": '{"t": 3}'},
        ],
        {"tools": TOOLS},
    ),
    "finished": (
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}],
        {"add_generation_prompt": False},
    ),
}


def render(source: str, messages: list[Any] | None = None, **variables: Any) -> str:
    return ChatTemplate(source, SPECIAL).render(messages or [{"role": "user", "content": "x"}], **variables)


def by_transformers(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    given = {"tools": None, "documents": None, "add_generation_prompt": True, **SPECIAL, **variables}
    text: str = _compile_jinja_template(source).render(messages=messages, **given)
    return text


def assert_as_transformers(source: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> bool:
    """The same prompt; where transformers cannot render, lean may refuse or (appending to lists) do better."""
    try:
        wanted = by_transformers(source, messages, **variables)
    except Exception:
        return False
    assert render(source, messages, **variables) == wanted
    return True


def test_smollm2_prompt_is_that_of_transformers(smollm2_gguf: Path) -> None:
    """The demo's chat, with the template in its own file, and the ids it is turned into."""
    metadata = read_gguf(smollm2_gguf).metadata
    tokenizer = Tokenizer.from_metadata(metadata)
    template = ChatTemplate.from_metadata(metadata, tokenizer)
    for messages, variables in CONVERSATIONS.values():
        text = template.render(messages, **variables)
        assert text == by_transformers(
            metadata["tokenizer.chat_template"],
            messages,
            **{"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", **variables},
        )
        assert tokenizer.decode(tokenizer.encode_rendered(text)) == text


@pytest.mark.slow
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_published_templates_render_as_in_transformers(conversation: str) -> None:
    """Qwen, GLM, DeepSeek, Kimi, MiniMax, gpt-oss and all others that llama.cpp carries."""
    templates = sorted((fixtures.llama_cpp_models() / "templates").glob("*.jinja"))
    messages, variables = CONVERSATIONS[conversation]
    same = sum(assert_as_transformers(path.read_text(), messages, variables) for path in templates)
    assert same > 50


@pytest.mark.slow
def test_kimi_tool_calls_render_although_their_template_appends_to_a_list() -> None:
    """transformers' sandbox refuses this template's `append`, so it cannot be the measure here."""
    source = (fixtures.llama_cpp_models() / "templates" / "Kimi-K2-Thinking.jinja").read_text()
    messages, variables = CONVERSATIONS["tool call"]
    text = render(source, messages, **variables)
    assert "<|tool_call_begin|>functions.weather:0" in text
    assert '## Return of functions.weather:0\n{"t": 3}' in text


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        "{{ bos_token }}{% for m in messages -%}\n  [{{ loop.index0 }}/{{ loop.length }}] {{ m['content'] | trim }}"
        "\n{%- endfor %}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.content | upper }}{% endfor %}",
        "{% generation %}{{ messages[-1].content }}{% endgeneration %}{{ messages | tojson(indent=2) }}",
        "{% set ns = namespace(n=0, x=[]) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}"
        "{% set ns.x = ns.x + [m.role ~ '/' ~ ns.n] %}{% endfor %}{{ ns.x | join(', ') }}{{ '=' * ns.n }}",
        "{% macro f(m) %}<{{ m.role }}>{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}",
        "{% set t %}  {{ messages[0].content }} {% endset %}{{ t.strip() | replace('i', 'o') }}{{ '%s!' % t }}",
        "{% if tools is not none and tools %}{{ tools[0].function | items | list }}{% else %}none{% endif %}",
        "{% for role, group in messages | groupby('role') %}{{ role }}{{ group | map(attribute='content') | join }}"
        "{% endfor %}",
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first }}{{ missing }}",
    ],
)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_what_templates_use_works_as_in_transformers(source: str, conversation: str) -> None:
    """The meter on loops, literals and operators must not change what a template writes."""
    messages, variables = CONVERSATIONS[conversation]
    assert assert_as_transformers(source, messages, variables)


def test_content_parts_are_joined_and_other_kinds_refused() -> None:
    """OpenAI clients send lists of parts; an image cannot be silently dropped."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    with pytest.raises(UsageError, match=r"content\[0\].*image_url"):
        render("", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


@pytest.mark.parametrize(
    "message", [3, {}, {"role": "", "content": "x"}, {"role": "user"}, {"role": "user", "content": 5}]
)
def test_malformed_messages_are_refused_saying_which(message: Any) -> None:
    """Jinja would render most of them as empty text, and the model would answer nonsense."""
    with pytest.raises(UsageError, match=r"messages\[1\]"):
        render(CHATML, [{"role": "user", "content": "fine"}, message])


def test_an_assistant_message_may_hold_tool_calls_only() -> None:
    """That is how clients send back what the model asked for."""
    messages = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert render("{{ messages[0].content }}|{{ messages[0].tool_calls[0].id }}", messages) == "|abcdefghi"


def test_the_callers_messages_are_never_changed() -> None:
    """The next turn is rendered from the same objects."""
    messages = [{"role": "user", "content": "x", "tool_calls": [1]}]
    tools = [{"a": [1]}]
    render("{{ messages[0].tool_calls.append(2) }}{{ tools[0].a.append(2) }}", messages, tools=tools)
    assert messages[0]["tool_calls"] == [1]
    assert tools == [{"a": [1]}]


def test_a_template_can_refuse_messages_in_its_own_words() -> None:
    """`raise_exception` is how models say which conversations they were made for."""
    with pytest.raises(UsageError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_models_without_a_template_say_so() -> None:
    """Falling back to some other model's format would quietly give bad answers."""
    metadata = fixtures.trained_metadata("qwen2")
    tokenizer = Tokenizer.from_metadata(metadata)
    with pytest.raises(UsageError, match="plain completion"):
        ChatTemplate.from_metadata(metadata, tokenizer)
    with pytest.raises(FormatError, match="not a valid template"):
        ChatTemplate.from_metadata({**metadata, "tokenizer.chat_template": "{% if %}"}, tokenizer)
    with pytest.raises(FormatError, match="wanted text"):
        ChatTemplate.from_metadata({**metadata, "tokenizer.chat_template": 3}, tokenizer)


def test_special_tokens_and_the_tool_template_come_from_the_file() -> None:
    """Templates write `bos_token`; some files carry a second template for tools."""
    metadata = {
        **fixtures.trained_metadata("qwen2"),
        "tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}",
        "tokenizer.chat_template.tool_use": "tools",
    }
    template = ChatTemplate.from_metadata(metadata, Tokenizer.from_metadata(metadata))
    assert template.render([{"role": "user", "content": "x"}]) == "<|endoftext|><|im_end|>"
    assert template.render([{"role": "user", "content": "x"}], tools=TOOLS) == "tools"


FORK = "{% macro f(n) %}{% if n > 0 %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}"
GROW = "{% set ns = namespace(x='aaaaaaaa', y=[1]) %}{% for i in range(99) %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        pytest.param(FORK, marks=pytest.mark.slow),
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
        GROW + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
        GROW + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        GROW + "{% set t %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = t %}{% endfor %}",
        GROW + "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.y }}",
        pytest.param(
            GROW + "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.y | upper }}", marks=pytest.mark.slow
        ),
        GROW + "{% set ns.y = ns.y + ns.y %}{% endfor %}",
        pytest.param("{% set x = [] %}{{ x.append(x) }}{{ x | tojson }}", marks=pytest.mark.slow),
        "{{ 'a' * 10**10 }}",
        "{{ [0] * 10**10 }}",
        "{{ (9**999)**999 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, '999999999') }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a\nb' | indent(10**9) }}",
        "{{ [1] | tojson(indent=10**9) }}",
        "{{ [1] | slice(10**9) | list }}",
        "{{ strftime_now('%999999999d') }}",
        "{% set a = 'a' * 100000 %}{{ a.replace('a', a) }}",
        "{% set a = 'a' * 100000 %}{{ a | replace('a', a) }}",
        "{% set a = 'a' * 100000 %}{{ ([''] * 100000) | join(a) }}",
        "{% set a = 'a' * 100000 %}{{ a.join([''] * 100000) }}",
        "{% for i in range(99999) %}{{ 'a' * 2000 }}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.clear() }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_hostile_template_is_stopped(source: str) -> None:
    """A downloaded model file must not hang the machine, fill its memory, or reach outside."""
    with pytest.raises(UsageError):
        render(source)


@pytest.mark.parametrize(
    "source", ["{{ 'a' | center(10**9) }}", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "x" * 2_000_000]
)
def test_a_template_that_cannot_be_compiled_is_a_format_error(source: str) -> None:
    """Deep nesting must not crash the parser, and filters made for padding are not there."""
    with pytest.raises(FormatError):
        render(source)


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception.__globals__ }}", "{{ ''['__class__'] }}", "{{ messages | attr('__class__') }}"],
)
def test_a_template_sees_nothing_of_python(source: str) -> None:
    """Attributes of the interpreter are undefined to it."""
    assert render(source) == ""


def test_long_conversations_are_no_hostile_templates() -> None:
    """The meter must leave room for real use."""
    messages = [
        {"role": role, "content": "word " * 400} for _ in range(500) for role in ("user", "assistant")
    ]
    assert len(render(CHATML, messages)) > 2_000_000


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_thinking_can_be_switched_off_where_the_template_has_a_switch(name: str) -> None:
    """`--no-think` must do something, or say that it cannot."""
    source = CHATML + f"{{% if {name} is defined and not {name} %}}<think></think>{{% endif %}}"
    template = ChatTemplate(source, SPECIAL)
    said = template.render([{"role": "user", "content": "Hi"}], **template.thinking_off())
    assert said.endswith("<think></think>")
    with pytest.raises(UsageError, match="no switch for thinking"):
        ChatTemplate(CHATML, SPECIAL).thinking_off()
