"""A Jinja environment for templates that nobody vouches for: a chat template comes with the model file.

Jinja's immutable sandbox keeps a template away from Python's internals and from changing what it is given.
What it does not bound is work: nested loops, calls that call themselves, strings that double. Here a render
has a budget of steps (loop iterations and calls), every string or list that an operator makes has a size
limit, and the filters and methods that make long strings out of a small number are refused or limited. One
step is itself bounded work, since all that it works on is bounded; a hostile template can still keep a CPU
busy for some seconds before it is refused.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000
MAX_SIZE = 16 << 20
_STEPS = "render steps"
_WIDTH = re.compile(r"\d{5,}")
# Filters that no chat template needs and that make long strings of small numbers, or need the network's
# escaping.
_REFUSED_FILTERS = ("center", "filesizeformat", "format", "pprint", "random", "urlize", "wordwrap", "xmlattr")


class TemplateRefusal(TemplateError):
    """`raise_exception` in a template: it refuses the messages it was given."""


class StepCount:
    """The steps that one render may still take."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self._left = steps

    def take(self) -> None:
        """Uses one step. Raises `SecurityError` when there is none."""
        self._left -= 1
        if self._left < 0:
            raise SecurityError(f"the template takes more than {MAX_STEPS:,} steps")


def variables_with_budget(variables: dict[str, Any]) -> dict[str, Any]:
    """The variables of one render, with its budget under a name that a template cannot spell."""
    return {**variables, _STEPS: StepCount()}


class _GenerationMark(Extension):
    """`{% generation %}...{% endgeneration %}` marks an answer for training; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the statements between the marks."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with budgets, and the globals and filters that chat templates are written for."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_sized,
            extensions=[_GenerationMark, loopcontrols],
        )
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _to_json
        self.filters["replace"] = _replace
        self.filters["indent"] = _limited_argument(self.filters["indent"])
        self.filters["batch"] = _limited_argument(self.filters["batch"])
        self.filters["slice"] = _limited_argument(self.filters["slice"])
        self.filters["join"] = _sized_join(self.filters["join"])
        self.filters["counted"] = _counted
        self.filters["sized"] = _sized
        self.filters["string"] = lambda value: str(_sized(value))
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parses a template and puts every loop and every `~` under the render's budget."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = _apply("counted", loop.iter)
        for block in template.find_all(nodes.AssignBlock):
            block.filter = _apply("sized", block.filter, block.lineno)
        for filtered in template.find_all(nodes.FilterBlock):
            filtered.filter = _apply("sized", filtered.filter)
        for concat in list(template.find_all(nodes.Concat)):
            # "a ~ b" becomes "(a | sized ~ b | sized) | sized", in place.
            parts = [_apply("sized", part) for part in concat.nodes]
            concat.nodes = [_apply("sized", nodes.Concat(parts, lineno=concat.lineno))]
        return template

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls from a template cost a step; methods of strings may not be asked for huge results."""
        context.resolve(_STEPS).take()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _check_string_method(owner, obj.__name__, (*args, *kwargs.values()))
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, str | list | tuple):
            _check_size(len(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Operators whose result can be far longer than what they are given."""
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(sequence, str | list | tuple):
                    _check_size(len(sequence) * max(times, 0))
            _check_number(left, right)
        elif operator == "**":
            _check_number(left, right)
            if isinstance(right, int | float) and abs(right) > 1000:
                raise SecurityError("the template raises a number to a power above 1000")
        elif operator == "%" and isinstance(left, str) and _WIDTH.search(left):
            raise SecurityError("the template formats text to an unreasonable width")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, str | list | tuple):
            _check_size(len(result))
        return result


def _apply(name: str, node: nodes.Node | None, line: int | None = None) -> nodes.Filter:
    # jinja's own visitor takes any node here, and none at all for what a block holds
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno if node is not None else line)


@pass_context
def _counted(context: Context, values: Any) -> Any:
    """The values of a loop, one step each. What cannot be looped over is left for the loop to refuse."""
    steps: Any = context.resolve(_STEPS)
    if isinstance(values, Undefined) or not isinstance(values, Iterable):
        return values
    return _Counted(values, steps)


class _Counted:
    """An iterable with the length of what it wraps (if that has one), so that `loop.last` needs no copy."""

    def __init__(self, values: Iterable[Any], steps: StepCount) -> None:
        self._values = values
        self._steps = steps

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._steps.take()
            yield value

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]  # a TypeError tells jinja to count


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise SecurityError(f"the template makes a value of size {size:,}; {MAX_SIZE:,} is the most")


def _check_number(*numbers: Any) -> None:
    if any(isinstance(number, int) and number.bit_length() > 4096 for number in numbers):
        raise SecurityError("the template computes with a number of more than 4096 bits")


def _check_string_method(owner: str, name: str, arguments: tuple[Any, ...]) -> None:
    if any(isinstance(argument, int) and argument > MAX_SIZE for argument in arguments):
        raise SecurityError(f"the template calls {name}() with an unreasonable number")
    if name == "replace" and len(arguments) > 1:
        _check_replacement(owner, str(arguments[0]), str(arguments[1]))
    elif name in ("join", "translate"):
        _check_size(len(owner) * max((len(a) for a in arguments if hasattr(a, "__len__")), default=0))
    elif name in ("format", "format_map") and _WIDTH.search(owner):
        raise SecurityError("the template formats text to an unreasonable width")


def _check_replacement(text: str, old: str, new: str) -> None:
    _check_size(len(text) + text.count(old) * max(len(new) - len(old), 0))


def _sized(value: Any) -> Any:
    """The value itself, once its text is known not to be huge: a list in a list in a list unfolds."""
    size, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            waiting += item
        size += len(item) if isinstance(item, str) else 1
        _check_size(size)
    return value


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    """`replace` as jinja has it, with its result's size checked first."""
    whole, old, new = str(text), str(old), str(new)
    _check_replacement(whole, old, new)
    return whole.replace(old, new, count)


def _limited_argument(made: Callable[..., Any]) -> Callable[..., Any]:
    def limited(value: Any, *args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, int) and argument > 10_000:
                raise SecurityError(f"the template asks for {argument:,} of something; 10,000 is the most")
        result = made(value, *args, **kwargs)
        if isinstance(result, str):
            _check_size(len(result))
        return result

    return limited


def _sized_join(join: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def sized_join(context: Context, values: Any, separator: str = "", attribute: Any = None) -> Any:
        items = _sized(list(values))
        _check_size(len(str(separator)) * len(items))
        return join(context.eval_ctx, items, separator, attribute)

    return sized_join


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as model templates expect it: not escaped for HTML, keys in their own order."""
    if isinstance(indent, int) and indent > 64:
        raise SecurityError(f"the template indents JSON by {indent}; 64 is the most")
    return json.dumps(
        _sized(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(form: str) -> str:
    if _WIDTH.search(form):
        raise SecurityError("the template formats the date to an unreasonable width")
    return datetime.now().strftime(form)
