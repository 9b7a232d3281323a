"""Settings, conninfo and names, without a server."""

from __future__ import annotations

import pickle

import pytest
from psycopg.conninfo import conninfo_to_dict

from penstock.errors import ConfigError
from penstock.source import NO_TIMEOUTS, Role, SourceSettings
from penstock.source.connections import application_name, build_conninfo

SECRET = "s3cret-pa55"


def conninfo(url: str, **options: bool) -> dict[str, str]:
    settings = SourceSettings(url)
    parsed = conninfo_to_dict(build_conninfo(settings, Role.CATALOG, {}, **options))
    return {key: str(value) for key, value in parsed.items()}


def test_the_url_is_never_shown() -> None:
    for url in (
        f"postgresql://me:{SECRET}@db.example:6543/shop?sslpassword={SECRET}",
        f"host=db.example port=6543 dbname=shop user=me password='{SECRET}'",
    ):
        settings = SourceSettings(url)
        assert SECRET not in repr(settings) + str(settings) + repr(settings.place)
        assert str(settings) == "db.example:6543/shop"
        assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{SECRET} x@h/d",
        f"postgresql://me:{SECRET}/x@h/d",
        "postgresql://me:12/34@h/d",
        f"postgresql://me:a@{SECRET}@h/d",
        f"host=h password={SECRET} rest",
        f"host=h password=first {SECRET}",
        f"postgresql://h/d?password=first&{SECRET}",
        f"postgresql://me:first@h/d?{SECRET}@h",
        "postgresql://h/d?no_such_option=1",
        f"postgresql://me:{SECRET}@h:port/d",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_quoting_it(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SourceSettings(url)
    assert SECRET not in str(caught.value) + caught.value.hint
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_mistake_outside_the_secrets_is_quoted() -> None:
    with pytest.raises(ConfigError, match="no_such_option"):
        SourceSettings(f"postgresql://me:{SECRET}@h/d?no_such_option=1")


def test_keepalives_are_on_unless_the_url_says_otherwise() -> None:
    values = conninfo("postgresql://h/d")
    assert (values["keepalives_idle"], values["keepalives_interval"], values["keepalives_count"]) == ("30", "10", "3")
    assert conninfo("postgresql://h/d?keepalives_idle=5")["keepalives_idle"] == "5"
    assert conninfo("postgresql://h/d?connect_timeout=3")["connect_timeout"] == "3"
    assert conninfo("postgresql://h/d?sslmode=verify-full")["sslmode"] == "verify-full"


def test_options_of_the_url_come_first_so_that_ours_win(monkeypatch: pytest.MonkeyPatch) -> None:
    options = conninfo("postgresql://h/d?options=-c%20datestyle%3DSQL")["options"]
    assert options.startswith("-c datestyle=SQL ")
    assert options.index("datestyle=ISO") > options.index("datestyle=SQL")
    monkeypatch.setenv("PGOPTIONS", "-c work_mem=8MB")
    assert conninfo("postgresql://h/d")["options"].startswith("-c work_mem=8MB ")


def test_only_replication_connections_ask_for_replication() -> None:
    assert "replication" not in conninfo("postgresql://h/d?replication=true")
    assert conninfo("postgresql://h/d", replication=True)["replication"] == "database"
    settings = SourceSettings("postgresql://h/d")
    options = conninfo_to_dict(build_conninfo(settings, Role.CAPTURE, NO_TIMEOUTS, replication=True))["options"]
    assert "-c statement_timeout=0" in str(options)


def test_application_names_fit_and_keep_their_role() -> None:
    assert application_name("penstock", Role.CAPTURE) == "penstock:capture"
    name = application_name("ä" * 60, Role.SNAPSHOT)
    assert len(name.encode()) <= 63
    assert name.endswith(":snapshot")
    assert conninfo("postgresql://h/d?application_name=mine")["application_name"] == "mine:catalog"
