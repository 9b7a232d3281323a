"""The tree of errors: complete, documented, and able to cross process borders."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
from collections.abc import Iterator

import pytest

import penstock
from penstock import errors
from penstock.errors import DecodeError, PenstockError, Retry

for _module in pkgutil.walk_packages(penstock.__path__, "penstock."):
    importlib.import_module(_module.name)


def _all_errors(kind: type[PenstockError] = PenstockError) -> Iterator[type[PenstockError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _all_errors(each)


ALL = sorted(set(_all_errors()), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickle_with_its_facts(kind: type[PenstockError]) -> None:
    facts = {"offset": 7} if issubclass(kind, DecodeError) else {"slot": "s", "pid": 12}
    error = kind("what happened", hint="what to try", **facts)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == copy.message == "what happened"
    assert copy.hint == "what to try"
    assert copy.facts == facts
    assert all(getattr(copy, name) == value for name, value in facts.items())


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_says_what_a_worker_does_and_is_in_the_drawing(kind: type[PenstockError]) -> None:
    assert isinstance(kind.retry, Retry)
    assert kind.__doc__
    assert kind.__module__ == "penstock.errors"
    assert errors.__doc__ is not None
    assert kind.__name__ in errors.__doc__


def test_the_drawing_names_only_errors_that_exist() -> None:
    assert errors.__doc__ is not None
    drawn = {line.split("── ")[1].split()[0] for line in errors.__doc__.splitlines() if "── " in line}
    assert drawn == {kind.__name__ for kind in ALL} - {"PenstockError"}


def test_an_unknown_fact_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'pid'"):
        _ = PenstockError("x").pid
