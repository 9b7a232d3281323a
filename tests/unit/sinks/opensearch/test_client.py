"""Options of the sink: checked at once, and without a secret in sight."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.sinks.opensearch import OpenSearchSettings, OpenSearchSink


def test_credentials_leave_the_url() -> None:
    settings = OpenSearchSettings("https://me:s%40cret@search:9200/api")
    assert (settings.url, settings.user, settings.password) == ("https://search:9200/api", "me", "s@cret")
    assert "s@cret" not in repr(settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "search:9200"}, "url must be"),
        ({"url": "https://"}, "url must be"),
        ({"retry_seconds": 301}, "retry_seconds"),
        ({"bulk_documents": 0}, "bulk_documents"),
        ({"replicas": -1}, "replicas"),
        ({"shards": "3"}, "shards must be an integer"),
        ({"shards": True}, "shards must be an integer"),
        ({"verify_certificates": "yes"}, "verify_certificates must be true or false"),
        ({"grace_seconds": "10m"}, "grace_seconds must be an integer or a number"),
        ({"user": 7}, "user must be a string or omitted"),
    ],
    ids=str,
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenSearchSettings(**{"url": "http://search:9200", **options})


def test_a_sink_that_has_not_connected_can_be_pickled() -> None:
    sink = OpenSearchSink("http://search:9200", bulk_documents=7)
    assert pickle.loads(pickle.dumps(sink)).settings == sink.settings
