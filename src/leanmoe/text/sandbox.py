"""A Jinja environment for templates that nobody vouches for: a chat template comes with the model file.

Jinja's sandbox keeps a template away from Python's internals. What it does not bound is work: nested loops,
calls that call themselves, strings and lists that double. Here the loop iterations and calls of a render, and
the values that it makes, are charged to a meter, which stops it in the end. What would be huge before it
could be charged (repetition, replacement, padding) is refused beforehand. This bounds time and memory for
practical purposes, to some seconds and some hundred MB; it is no proof against somebody who studies it.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SIZE = 4 << 20
"""The most characters in a string, or items in a list, that a template may make."""
MAX_WORK = 3_000_000
"""The most units of work for one render: an iteration, an item of a value, 64 characters; 16 for a call."""

_WIDTH = re.compile(r"\d{5,}")
_NESTED_FIELD = re.compile(r"\{[^{}]*\{")
# Filters that no chat template needs and that make long strings of small numbers.
_REFUSED_FILTERS = ("center", "filesizeformat", "format", "pprint", "random", "urlize", "wordwrap", "xmlattr")
# Filters that do not look into the items of what they are given; all others pay for what these hold.
_SHALLOW_FILTERS = frozenset(
    (
        *(
            "attr",
            "batch",
            "count",
            "d",
            "default",
            "dictsort",
            "first",
            "groupby",
            "items",
            "last",
            "length",
        ),
        *("list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"),
    )
)
_CALL = 16


class TemplateRefusal(TemplateError):
    """`raise_exception` in a template: it refuses the messages it was given."""


class Meter:
    """Counts the work of one render; use it as a context around the render."""

    _current: ContextVar["Meter"] = ContextVar("render meter")

    def __init__(self) -> None:
        self._left = MAX_WORK

    def __enter__(self) -> "Meter":
        self._token = Meter._current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        Meter._current.reset(self._token)

    @staticmethod
    def left() -> int:
        """What the render that is going on may still use."""
        return Meter._current.get()._left

    @staticmethod
    def take(units: int = 1) -> None:
        """Charges work to the render that is going on. Raises `SecurityError` when it has had its share."""
        meter = Meter._current.get()
        meter._left -= units
        if meter._left < 0:
            raise SecurityError(f"the template takes more than {MAX_WORK:,} steps")


def _touch(value: Any) -> Any:
    """Charges for looking at a value once, and returns it."""
    if isinstance(value, str | list | tuple):
        _check_size(len(value))
        Meter.take(1 + len(value) // 64)
    elif isinstance(value, int):
        _check_bits(value.bit_length())
    return value


def _charge(value: Any) -> Any:
    """Charges for a value and all that it holds, and returns it."""
    units, most, waiting = 0, Meter.left(), [value]
    while waiting and units <= most:
        item = waiting.pop()
        units += 1
        if isinstance(item, str):
            _check_size(len(item))
            units += len(item) // 64
        elif isinstance(item, list | tuple | set):
            waiting += item
        elif isinstance(item, int):
            _check_bits(item.bit_length())
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
    Meter.take(units)
    return value


class _GenerationMark(Extension):
    """`{% generation %}...{% endgeneration %}` marks an answer for training; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the statements between the marks."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Metering(NodeTransformer):
    """Puts a meter on a template's loops and on the values that it writes down."""

    def _charged(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _apply("_charge", node)

    visit_List = visit_Dict = visit_Concat = _charged

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """A tuple that is a value; one that is assigned to stays."""
        return self._charged(node) if node.ctx == "load" else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Both sides may be long."""
        self.generic_visit(node)
        node.expr = _apply("_charge", node.expr)
        for operand in node.ops:
            operand.expr = _apply("_charge", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """A slice is a copy."""
        self.generic_visit(node)
        return _apply("_touch", node) if node.ctx == "load" else node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Each iteration is a step."""
        self.generic_visit(node)
        node.iter = _apply("_counted", node.iter)
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        """The text of a block becomes a value."""
        self.generic_visit(node)
        node.filter = _apply("_touch", node.filter, node.lineno)
        return node


def _apply(name: str, node: nodes.Node | None, line: int | None = None) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=line if node is None else node.lineno)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with the globals and filters that chat templates use. Render within a `Meter`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_charge,
            extensions=[_GenerationMark, loopcontrols],
        )
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        self.filters |= {"tojson": _to_json, "replace": _replace}
        for name in ("indent", "batch", "slice", "truncate", "round"):
            self.filters[name] = _small_numbers(self.filters[name])
        self.filters["join"] = _checked_join(self.filters["join"])
        for name, made in self.filters.items():
            self.filters[name] = _charged_filter(made, name in _SHALLOW_FILTERS)
        self.filters |= {"_counted": _counted, "_charge": _charge, "_touch": _touch}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Metering().visit(super()._parse(source, name, filename))
        return template

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As in jinja, but lists may be changed: some templates collect tool calls so (give them copies)."""
        return (type(obj) is list and attr in ("append", "pop")) or super().is_safe_attribute(
            obj, attr, value
        )

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls from a template, charged for what they are given and what they return."""
        Meter.take(_CALL)
        given = (*args, *kwargs.values())
        for argument in given:
            _charge(argument)
        # str.format arrives wrapped by jinja.
        method = getattr(obj, "__wrapped__", obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_string_method(_touch(owner), method.__name__, given)
        return _touch(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Operators whose result can be far longer than what they are given."""
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(sequence, str | list | tuple):
                    _check_size(len(sequence) * max(times, 0))
            return _charge(super().call_binop(context, operator, left, right))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))
        elif operator == "%" and isinstance(left, str) and ("*" in left or _WIDTH.search(left)):
            raise SecurityError("the template formats text to an unreasonable width")
        _charge(right)
        return _touch(super().call_binop(context, operator, left, right))


def _counted(values: Any) -> Any:
    """The values of a loop, one step each. What cannot be looped over is left for the loop to refuse."""
    if isinstance(values, Iterator):
        return _steps(values)
    return _CountedValues(values) if isinstance(values, Iterable) else values


def _steps(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        Meter.take()
        yield value


class _CountedValues:
    """An iterable of known length, so that `loop.length` and `loop.last` need no copy."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        return _steps(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise SecurityError(f"the template makes a value of size {size:,}; {MAX_SIZE:,} is the most")


def _check_bits(bits: int) -> None:
    if bits > 4096:
        raise SecurityError("the template computes with a number of more than 4096 bits")


def _check_string_method(owner: str, name: str, arguments: tuple[Any, ...]) -> None:
    if any(isinstance(argument, int) and argument > 10_000 for argument in arguments) and name != "replace":
        raise SecurityError(f"the template calls {name}() with an unreasonable number")
    if name == "replace" and len(arguments) > 1:
        _check_replacement(owner, str(arguments[0]), str(arguments[1]))
    elif name in ("join", "translate"):
        _check_size(len(owner) * max((len(a) for a in arguments if hasattr(a, "__len__")), default=0))
    elif name in ("format", "format_map") and (_WIDTH.search(owner) or _NESTED_FIELD.search(owner)):
        raise SecurityError("the template formats text to an unreasonable width")


def _check_replacement(text: str, old: str, new: str) -> None:
    _check_size(len(text) + text.count(old) * max(len(new) - len(old), 0))


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    """`replace` as jinja has it, with its result's size checked first."""
    whole, old, new = str(text), str(old), str(new)
    _check_replacement(whole, old, new)
    return whole.replace(old, new, count)


def _charged_filter(made: Callable[..., Any], shallow: bool) -> Callable[..., Any]:
    """A filter that pays for what it is given and for what it makes."""

    @functools.wraps(made)
    def charged(*args: Any, **kwargs: Any) -> Any:
        pay = _touch if shallow else _charge
        for argument in args:
            pay(argument)
        result = made(*args, **kwargs)
        return _steps(result) if isinstance(result, Iterator) else _touch(result)

    return charged


def _small_numbers(made: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments say how much it makes."""

    @functools.wraps(made)
    def limited(*args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, int) and argument > 10_000:
                raise SecurityError(f"the template asks for {argument:,} of something; 10,000 is the most")
        return made(*args, **kwargs)

    return limited


def _checked_join(made: Callable[..., Any]) -> Callable[..., Any]:
    """`join` as jinja has it, with its result's size checked first."""

    @functools.wraps(made)
    def checked(context: Any, value: Any, d: Any = "", attribute: Any = None) -> Any:
        items = list(value)
        held = sum(len(item) for item in items if isinstance(item, str))
        _check_size(held + len(str(d)) * len(items))
        return made(context, items, d, attribute)

    return checked


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
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(form: str) -> str:
    if _WIDTH.search(form):
        raise SecurityError("the template formats the date to an unreasonable width")
    return datetime.now().strftime(form)
