"""`config.json` of a checkpoint, with every value checked as it is taken. All of it is untrusted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leanmoe.errors import FormatError
from leanmoe.formats.safetensors import read_json

MAX_LAYERS, MAX_EXPERTS, MAX_VOCAB = 4096, 1 << 16, 1 << 22


class Config:
    """Typed access to a model's configuration. One that wraps a text model (`text_config`) reads as that model."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        inner = values.get("text_config")
        self.values: Mapping[str, Any] = {**values, **inner} if isinstance(inner, dict) else values
        self.source = source

    @classmethod
    def read(cls, folder: Path) -> "Config":
        """The configuration of the checkpoint in `folder`. Raises `UsageError`, `FormatError`."""
        path = folder / "config.json"
        return cls(read_json(path), str(path))

    @property
    def model_type(self) -> str:
        """The family's name in transformers."""
        return self.text("model_type")

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self.values.get(key) is not None

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The whole number at the first of `keys` that is there. Raises `FormatError`."""
        value = self._first(keys, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32:
            raise self.error(f"{keys[0]} is {_short(value)}; a whole number was wanted")
        return value

    def size(self, *keys: str, limit: int = 1 << 31) -> int:
        """The whole number from 1 to `limit` at the first of `keys` that is there. Raises `FormatError`."""
        value = self.integer(*keys)
        if not 1 <= value <= limit:
            raise self.error(f"{keys[0]} is {value}; a number from 1 to {limit} was wanted")
        return value

    @property
    def layers(self) -> int:
        """The number of blocks, beside those for multi-token prediction. Raises `FormatError`."""
        return self.size("num_hidden_layers", limit=MAX_LAYERS)

    def number(self, *keys: str, default: float | None = None) -> float:
        """The finite number at the first of `keys` that is there. Raises `FormatError`."""
        value = self._first(keys, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
            raise self.error(f"{keys[0]} is {_short(value)}; a finite number was wanted")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false. Raises `FormatError`."""
        value = self._first((key,), default)
        if not isinstance(value, bool):
            raise self.error(f"{key} is {_short(value)}; true or false was wanted")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string. Raises `FormatError`."""
        value = self._first((key,), default)
        if not isinstance(value, str):
            raise self.error(f"{key} is {_short(value)}; a string was wanted")
        return value

    def section(self, key: str) -> "Config":
        """The object at `key`, empty if it is missing or null. Raises `FormatError`."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"{key} is {str(value)[:80]!r}; an object was wanted")
        return Config(value or {}, f"{self.source}: {key}")

    @property
    def rope(self) -> "Config":
        """The settings of rotary embedding (`rope_type`, `rope_theta`, ...), from new and old configurations alike."""
        values = {**self.section("rope_scaling").values, **self.section("rope_parameters").values}
        values.setdefault("rope_type", values.get("type", "default"))
        for key in ("rope_theta", "partial_rotary_factor"):
            if key not in values and self.has(key):
                values[key] = self.values[key]
        return Config(values, f"{self.source}: rope_parameters")

    def error(self, what: str) -> FormatError:
        """A `FormatError` that names this configuration."""
        return FormatError(f"{self.source}: {what}")

    def _first(self, keys: tuple[str, ...], default: Any) -> Any:
        value = next((self.values[key] for key in keys if self.has(key)), default)
        if value is None:
            raise self.error(f"{keys[0]} is missing; a model of this kind needs it")
        return value


def _short(value: Any) -> str:
    return repr(value)[:80]
