"""Postgres text into Arrow, a column at a time, a file per family of types; and policies for values that do not fit.

Importing the families registers them.
"""

from penstock.values import arrays, datetimes, numbers, text  # noqa: F401
from penstock.values.codec import MAX_TEXT_BYTES, Codec, Decoded, codec_for
from penstock.values.policy import PolicyResult, apply_policy
from penstock.values.settings import CompositePolicy, NumericPolicy, OutOfRange, TypeSettings, UnknownTypes

__all__ = [
    "MAX_TEXT_BYTES",
    "Codec",
    "CompositePolicy",
    "Decoded",
    "NumericPolicy",
    "OutOfRange",
    "PolicyResult",
    "TypeSettings",
    "UnknownTypes",
    "apply_policy",
    "codec_for",
]
