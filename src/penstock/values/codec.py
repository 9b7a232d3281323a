"""Codecs: what decodes one column, and which codec a Postgres type gets.

A codec takes a whole column of Postgres *text* values and gives an Arrow array. Families of types live in files of
their own, each ending in its registration; `penstock.values` imports them all, so code that can import this module
finds the table complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.schema import PostgresType, TypeKind, resolve_domain
from penstock.values.settings import OutOfRange, TypeSettings

MAX_TEXT_BYTES = 2**31 - 1
"""The most text that one `decode` call accepts: results have 32-bit offsets. Callers split longer columns by rows."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded column."""

    array: pa.Array
    """Of the codec's `arrow_type`, as long as the input."""
    rejected: NDArray[np.bool_] | None
    """Cells whose value the type cannot hold (`array` is NULL there); None if there are none."""


class Codec(Protocol):
    """Decodes the text of one type. Immutable, hashable, picklable, and free of I/O: any thread may call it."""

    @property
    def arrow_type(self) -> pa.DataType:
        """The type of every array that `decode` returns."""
        ...

    def decode(self, text: pa.LargeStringArray) -> Decoded:
        """Decode a column. NULL stays NULL; text that the type cannot hold is rejected and never raises.

        The one exception is a column of more than `MAX_TEXT_BYTES`: `OverflowError`, a mistake of the caller.
        """
        ...


CodecFactory = Callable[[PostgresType, int, TypeSettings], Codec]


@dataclass(frozen=True, slots=True)
class _Registered:
    factory: CodecFactory
    rejects: bool = False


_BY_NAME: dict[str, _Registered] = {}
_BY_KIND: dict[TypeKind, _Registered] = {}
_BY_EXTENSION_NAME: dict[str, _Registered] = {}


def register(*names: str, factory: CodecFactory, rejects: bool = False) -> None:
    """Decode the built-in types of these names with `factory`.

    `rejects` says that Postgres has values of the type that the Arrow type has not: under `out_of_range = "text"`
    such a column is text.
    """
    for name in names:
        _BY_NAME[name] = _Registered(factory, rejects)


def register_kind(*kinds: TypeKind, factory: CodecFactory, rejects: bool = False) -> None:
    """Decode all types of these kinds with `factory`; `BASE` is what no name matches."""
    for kind in kinds:
        _BY_KIND[kind] = _Registered(factory, rejects)


def register_extension(*names: str, factory: CodecFactory) -> None:
    """Decode base types of these names with `factory`, regardless of the schema of their extension."""
    for name in names:
        _BY_EXTENSION_NAME[name] = _Registered(factory)


@lru_cache(maxsize=4096)
def codec_for(type_: PostgresType, modifier: int, settings: TypeSettings = TypeSettings()) -> Codec:  # noqa: B008 (frozen)
    """The codec of a column; `modifier` is its `atttypmod`."""
    type_, modifier = resolve_domain(type_, modifier)
    registered = _find(type_)
    if settings.as_text or (registered.rejects and settings.out_of_range is OutOfRange.TEXT):
        registered = _BY_NAME["text"]
    return registered.factory(type_, modifier, settings)


def _find(type_: PostgresType) -> _Registered:
    if type_.kind is TypeKind.BASE:
        names = _BY_NAME if type_.is_builtin else _BY_EXTENSION_NAME
        if type_.name in names:
            return names[type_.name]
    return _BY_KIND[type_.kind]
