"""What a run is: a frozen configuration, its key, and the line that it leaves."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeVar, get_type_hints

from .methods import Method

#: Goes into every key: another protocol makes other runs.
PROTOCOL = 1

C = TypeVar("C", bound="Config")


@dataclass(frozen=True)
class Config:
    """What all experiments share. The same seed gives all methods the same first weights, images and batches.

    ``choosing``: scored on images held back from the training data, to choose rate and weight; else on the test data.
    """

    experiment: ClassVar[str]

    method: Method = "plain"
    rate: float = 0.1
    weight: float = 0.0  # lambda, or the rate of the projection
    seed: int = 0
    choosing: bool = False

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that stand for the whole configuration."""
        text = json.dumps([PROTOCOL, self.experiment, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that differ from the defaults."""
        default = type(self)()
        return {name: value for name, value in asdict(self).items() if value != getattr(default, name)}

    @property
    def command(self) -> str:
        """Repeats this run."""
        settings = [f"{name}={_written(value)}" for name, value in self.changed.items()]
        return " ".join(["python -m experiments run", self.experiment, *settings, "--data DATA"])


def _written(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def configured(kind: type[C], settings: list[str]) -> C:
    """A configuration from ``name=value`` words."""
    hints: dict[str, Any] = get_type_hints(kind)
    values: dict[str, Any] = {}
    names = [field.name for field in fields(kind)]
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name not in names:
            raise ValueError(f"a setting of {kind.experiment} must be name=value with one of {', '.join(names)}, "
                             f"got {setting!r}")  # fmt: skip
        values[name] = _parsed(setting, hints[name], text)
    return kind(**values)


def _parsed(setting: str, hint: Any, text: str) -> object:
    if hint is bool:
        if text not in ("True", "False"):
            raise ValueError(f"a switch must be True or False, got {setting!r}")
        return text == "True"
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise ValueError(f"{setting.partition('=')[0]} must be {hint.__name__}, got {text!r}") from None
    return text


@dataclass(frozen=True)
class Line:
    """What a finished run leaves in results/<experiment>.jsonl; with the same sources, torch and kind of processor
    ``result`` is the same at every repetition."""

    experiment: str
    key: str
    config: dict[str, Any]
    result: dict[str, Any]
    timing: dict[str, Any]  # processor seconds, which are not
    torch: str
    command: str
    commit: str = ""  # of the sources; the first lines do not say
