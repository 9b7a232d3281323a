"""What an error of a destination means: tried again, or for a person."""

from __future__ import annotations

import errno

import pyarrow as pa
import pytest

from penstock.destinations.refusals import unexpected, unreadable
from penstock.errors import Retry, TableRejected


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_disk_that_may_be_well_again_is_tried_again(number: int) -> None:
    error = OSError(number, "what it says", "/lake/part.parquet")
    assert unexpected("t", error).retry is Retry.TIMED
    assert "/lake/part.parquet" in str(unexpected("t", error))
    assert unreadable("t", 7, error).retry is Retry.TIMED


@pytest.mark.parametrize("error", [NotADirectoryError(errno.ENOTDIR, "no folder", "/lake"), ValueError("cell 42")])
def test_anything_else_is_for_a_person_and_quotes_no_cell(error: Exception) -> None:
    assert unexpected("t", error).retry is Retry.OPERATOR
    assert unreadable("t", 7, error).retry is Retry.OPERATOR
    assert "42" not in str(unexpected("t", error))


def test_an_error_with_a_name_keeps_it() -> None:
    error = TableRejected("t was rejected", table="t")
    assert unexpected("t", error) is error


@pytest.mark.parametrize("error", [MemoryError("x"), pa.ArrowMemoryError("malloc of size 42 failed")])
def test_a_lack_of_memory_is_called_so_and_tried_again(error: Exception) -> None:
    for found in (unexpected("t", error), unreadable("t", 7, error)):
        assert found.retry is Retry.TIMED
        assert str(found) == "t: a task ran out of memory"
        assert "memoryOverhead" in found.hint
