"""docs/reference/errors.md has every error with its class's own words, and no others."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from penstock import errors

PAGE = (Path(__file__).parents[2] / "docs/reference/errors.md").read_text()


RETRIED = {
    errors.Retry.TIMED: "yes",
    errors.Retry.COPY: "copy",
    errors.Retry.ALONE: "alone",
    errors.Retry.RESTART: "restart",
    errors.Retry.RECREATE: "recreate",
    errors.Retry.OPERATOR: "no",
}


def test_the_page_has_every_error_and_no_others():
    found = {
        name: [cell.strip() for cell in rest.split("|")][:3]
        for name, rest in re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE)
    }
    expected = {
        each.__name__: [
            " ".join((inspect.getdoc(each) or "").split()),
            RETRIED[each.retry],
            each.default_hint,
        ]
        for each in vars(errors).values()
        if inspect.isclass(each) and issubclass(each, errors.PenstockError) and each is not errors.PenstockError
    }
    assert found == expected
