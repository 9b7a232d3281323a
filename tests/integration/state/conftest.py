"""Failures of the shipped contract are shown like those of any test."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("penstock.testing.stores")
