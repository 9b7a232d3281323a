"""Decodes Postgres text to Arrow, column at a time, with one file per type family; policies for unrepresentable values.

Importing the families registers them.
"""

from penstock.values import arrays, datetimes, numbers, text  # noqa: F401
from penstock.values.codec import MAX_TEXT_BYTES, Codec, Decoded, codec_for
from penstock.values.policy import PolicyResult, apply_policy, merging_setting, settle
from penstock.values.settings import (
    CompositePolicy,
    NumericPolicy,
    OutOfRange,
    TypeOverride,
    TypeSettings,
    UnknownTypes,
)

__all__ = [
    "MAX_TEXT_BYTES",
    "Codec",
    "CompositePolicy",
    "Decoded",
    "NumericPolicy",
    "OutOfRange",
    "PolicyResult",
    "TypeOverride",
    "TypeSettings",
    "UnknownTypes",
    "apply_policy",
    "codec_for",
    "merging_setting",
    "settle",
]
