"""Tests of the contract carry the marks of the traps that their docstrings name."""

from __future__ import annotations

import re
import sys

import pytest

# Other tests may have imported it already; then failures say less.
if "penstock.testing.destinations.contract" not in sys.modules:
    pytest.register_assert_rewrite("penstock.testing.destinations.contract")

from penstock.testing.destinations import DestinationContract

for _test in vars(DestinationContract).values():
    _numbers = re.match(r"Traps? ([\d, and]+)", getattr(_test, "__doc__", None) or "")
    if callable(_test) and _numbers is not None:
        pytest.mark.trap(*map(int, re.findall(r"\d+", _numbers[1])))(_test)
