"""A config without its secrets."""

from __future__ import annotations

import json
import tomllib

from penstock.operations.report import hidden_texts, redact_config

WRITTEN = """
[pipeline]
id = "shop"
spool = {path = "/data/spool", max_bytes = "4GB"}
[source]
url = "postgresql://me:hunter2-url@db.example/shop"
tables = ["public.*"]
[state]
url = "host=db.example user=me password='hunter2 state'"
[spark]
master = "local[2]"
"spark.sql.shuffle.partitions" = 8
"spark.hadoop.fs.s3a.secret.key" = "hunter2-spark"
[[destination]]
name = "lake"
type = "delta"
path = "s3://bucket/lake"
storage = {access_key_id = "hunter2-id", secret_access_key = "${S3_SECRET}", allow_http = true}
[[destination]]
name = "hook"
type = "http"
url = "https://me:hunter2-basic@hooks.example/services/hunter2-path?token=hunter2-query"
headers = ["X-Key: hunter2-header"]
[[index]]
specification = "products.yml"
[sink]
type = "opensearch"
url = "https://me:hunter2-search@search.example"
password = "hunter2-sink"
pin = 12345678
max_changes = 5
[hash]
key = "hunter2-0123456789"
[tables."public.people".columns]
email = {hash = true}
"""
UNKNOWN = """
pipeline = "hunter2-pipeline"
passphrase = "hunter2-top"
[source]
url = "postgresql://me@db.example/shop"
password = "hunter2-key"
[secrets.deep]
er = ["hunter2-section", {password = "hunter2-inner"}]
[tables]
people = "hunter2-table"
[[index]]
name = {password = "hunter2-name"}
"""


def test_nothing_secret_is_left_and_what_helps_is() -> None:
    found = redact_config(tomllib.loads(WRITTEN))
    assert "hunter2" not in json.dumps(found)
    assert found["source"] == {"url": "postgresql://me:***@db.example/shop", "tables": ["public.*"]}
    assert found["state"]["url"] == "host=db.example user=me password=***"
    assert found["pipeline"]["spool"] == {"path": "/data/spool", "max_bytes": "4GB"}
    assert found["spark"]["spark.sql.shuffle.partitions"] == 8
    lake, hook = found["destination"]
    assert lake == {
        "name": "lake",
        "type": "delta",
        "path": "s3://bucket/lake",
        "storage": {"access_key_id": "***", "secret_access_key": "${S3_SECRET}", "allow_http": True},
    }
    assert hook["url"] == "https://hooks.example/***"
    assert hook["headers"] == ["***"]
    sink = {"type": "opensearch", "url": "https://search.example/***", "password": "***", "pin": "***"}
    assert found["sink"] == {**sink, "max_changes": 5}
    assert found["index"] == [{"specification": "products.yml"}]
    assert found["tables"] == {"public.people": {"columns": {"email": {"hash": True}}}}


def test_what_the_config_does_not_know_is_hidden() -> None:
    found = redact_config(tomllib.loads(UNKNOWN))
    assert "hunter2" not in json.dumps(found)
    assert found["source"] == {"url": "postgresql://me@db.example/shop", "password": "***"}
    assert found["secrets"] == {"deep": {"er": ["***", {"password": "***"}]}}


def test_what_is_hidden_is_known() -> None:
    hidden = hidden_texts(tomllib.loads(WRITTEN))
    assert {"hunter2-id", "hunter2-spark", "X-Key: hunter2-header"} <= hidden
    assert "s3://bucket/lake" not in hidden
    assert "${S3_SECRET}" not in hidden
