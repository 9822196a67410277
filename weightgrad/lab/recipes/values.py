"""The values of a recipe: text, numbers, names, and quantities kept in bit/s and seconds."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    SerializationInfo,
    Strict,
    StringConstraints,
    ValidationInfo,
    model_validator,
)

from weightgrad import units

_NAME = re.compile(r"[\w.-]*(\{\})?[\w.-]*")


class Section(BaseModel):
    """Base class of all sections of a recipe: frozen, no unknown keys, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _remember(cls, value: object, info: ValidationInfo) -> object:
        """Remember which section a mapping is, for error messages."""
        if isinstance(info.context, dict) and isinstance(value, dict):
            info.context[id(value)] = cls
        return value


def _positive(value: float) -> float:
    if value <= 0:
        raise ValueError(f"found {value:g}; wanted more than 0")
    return value


def _site_name(value: str) -> str:
    if not _NAME.fullmatch(value) or not re.search(r"\w|\{\}", value):
        raise ValueError(f"found {value!r}; wanted a name of letters, digits, '-', '_', '.', with at most one '{{}}'")
    return value


def _written(show: Callable[[float], str], read: Callable[[object], float]) -> PlainSerializer:
    """Serialize with a unit where asked to and where that loses nothing, otherwise as a number."""

    def write(value: float, info: SerializationInfo) -> float | str:
        with_unit = info.context == "units" and not isinstance(value, str)
        return show(value) if with_unit and read(show(value)) == value else value

    return PlainSerializer(write)


def _step_time(value: object) -> object:
    return value if value == "calibrate" else _positive(units.seconds(value))


Integer: TypeAlias = Annotated[int, Strict()]
Number: TypeAlias = Annotated[float, Strict()]
Boolean: TypeAlias = Annotated[bool, Strict()]
Text: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
SiteName: TypeAlias = Annotated[Text, AfterValidator(_site_name)]
Pair: TypeAlias = tuple[SiteName, SiteName]
Seconds: TypeAlias = Annotated[float, BeforeValidator(units.seconds), _written(units.show_seconds, units.seconds)]
Duration: TypeAlias = Annotated[Seconds, AfterValidator(_positive)]
BitRate: TypeAlias = Annotated[
    float, BeforeValidator(units.bit_s), AfterValidator(_positive), _written(units.show_bit_s, units.bit_s)
]
StepTime: TypeAlias = Annotated[
    float | Literal["calibrate"], BeforeValidator(_step_time), _written(units.show_seconds, units.seconds)
]
