"""Config files: what is understood, and what the errors say (and do not say)."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from penstock.config import load_config
from penstock.config.units import parse_duration, parse_size
from penstock.destinations.folders import RenameRules, RenameTable
from penstock.errors import ConfigError
from penstock.state.sqlite import SqliteStore
from penstock.tables import OnLostSlot
from penstock.values.settings import NumericPolicy, OutOfRange, UnknownTypes

SMALLEST = """
[pipeline]
id = "shop"
[source]
url = "postgresql://reader@db/shop"
[destination]
type = "parquet"
path = "lake"
"""
ROOT = Path(__file__).parents[3]


@pytest.fixture
def load(tmp_path):
    def load_text(text: str, **environment: str):
        path = tmp_path / "penstock.toml"
        path.write_text(text)
        return load_config(path, environment)

    return load_text


def refusal(load, text: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load(text, **environment)
    assert raised.value.__cause__ is None
    return f"{raised.value.message} {raised.value.hint}"


def test_the_smallest_config_has_defaults_beside_the_file(load, tmp_path):
    config = load(SMALLEST)
    settings = config.pipeline
    assert settings.id == "shop"
    assert settings.publication == settings.slot == "penstock_shop"
    assert settings.spool.path == tmp_path / ".penstock/shop/spool"
    assert config.state_file == tmp_path / ".penstock/shop/state.db"
    assert config.outputs[0].destination_options == {"path": str(tmp_path / "lake")}
    assert (config.spark.master, config.spark.is_used) == (None, True)
    assert settings.tables == ("*.*",)


def test_the_state_is_opened_in_a_folder_that_is_made(load):
    with load(SMALLEST).open_store() as store:
        assert isinstance(store, SqliteStore)
        assert store.pipeline_id == "shop"


def test_every_key_arrives_in_the_settings(load, tmp_path):
    config = load(
        """
        [pipeline]
        id = "Shop-2"
        spool = {path = "/var/spool/shop", max_bytes = "2GB", copy_max_bytes = 1000, min_free_bytes = "1 MiB"}
        error_hold = {time = "90min", bytes = "10kB"}
        batch = {max_rows = 7, max_bytes = "1MB", interval = "250ms"}
        [source]
        url = "host=db dbname=shop"
        publication = "pub"
        manage_publication = false
        tables = ["sales.*"]
        exclude = ["sales.tmp_*"]
        slot = "slot_1"
        on_lost_slot = "recreate"
        [state]
        url = "sqlite:///here.db"
        [copy]
        max_table_sync_workers = 2
        max_connections = 3
        max_bytes_per_second = "5MB"
        lock_timeout = 10
        [spark]
        master = "local[2]"
        memory = "2g"
        "spark.sql.shuffle.partitions" = 4
        spark.ui.enabled = true
        [destination]
        type = "memory"
        [types]
        numeric = "decimal"
        out_of_range = "null"
        unknown_types = "bytes"
        """
    )
    settings = config.pipeline
    assert (settings.spool.path, settings.spool.max_bytes) == (Path("/var/spool/shop"), 2 << 30)
    assert (settings.spool.copy_max_bytes, settings.spool.min_free_bytes) == (1000, 1 << 20)
    assert (settings.error_hold.time, settings.error_hold.bytes) == (timedelta(minutes=90), 10 << 10)
    assert (settings.batches.max_rows, settings.batches.max_bytes, settings.batches.interval) == (7, 1 << 20, 0.25)
    assert (settings.publication, settings.manage_publication, settings.slot) == ("pub", False, "slot_1")
    assert (settings.tables, settings.exclude) == (("sales.*",), ("sales.tmp_*",))
    assert settings.on_lost_slot is OnLostSlot.RECREATE
    assert config.state_file == tmp_path / "here.db"
    assert (settings.max_table_sync_workers, config.copy_tasks) == (2, 3)
    assert (settings.copy.max_bytes_per_second, settings.copy.lock_timeout) == (5 << 20, 10)
    assert config.spark.options == {"spark.sql.shuffle.partitions": "4", "spark.ui.enabled": "true"}
    assert (config.spark.master, config.spark.memory) == ("local[2]", "2g")
    types = settings.types
    assert (types.numeric, types.out_of_range) == (NumericPolicy.DECIMAL, OutOfRange.NULL)
    assert types.unknown_types is UnknownTypes.BYTES


def test_tables_and_columns_have_types_of_their_own(load):
    config = load(
        """
        [pipeline]
        id = "shop"
        [source]
        url = "postgresql://h/d"
        [destination]
        type = "memory"
        [types]
        numeric = "decimal"
        [tables."public.orders".types]
        out_of_range = "clamp"
        [tables."public.orders".types.columns."At Sea"]
        numeric = "double"
        """
    )
    types = config.pipeline.types
    found = {
        name: types.of(*name)
        for name in (("public.orders", "At Sea"), ("public.orders", "id"), ("public.other", "At Sea"))
    }
    assert [(each.numeric, each.out_of_range) for each in found.values()] == [
        (NumericPolicy.DOUBLE, OutOfRange.CLAMP),
        (NumericPolicy.DECIMAL, OutOfRange.CLAMP),
        (NumericPolicy.DECIMAL, OutOfRange.KEEP),
    ]
    assert not any(each.overrides for each in found.values())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[sorce]\n", 'sorce: there is no such key; did you mean "source"?'),
        ('[state]\nulr = "x"', 'state.ulr: there is no such key; did you mean "url"?'),
        ("[copy]\nmax_table_sync_worker = 3", 'did you mean "max_table_sync_workers"?'),
        ("[copy]\nexclude = []", "copy.exclude: there is no such key; it belongs to [source]"),
        ("[types]\nwhatever = 1", "types.whatever: there is no such key; known here: numeric, out_of_range"),
        ('[tables.t.types]\nnumric = "double"', "tables.t.types.numric: there is no such key"),
        ('[types]\nnumeric = "s3cret"', "types.numeric: should be 'string', 'decimal' or 'double'"),
        ("[copy]\nmax_connections = 0", "copy.max_connections: should be greater than or equal to 1"),
        ('[copy]\nlock_timeout = "s3cret"', 'copy.lock_timeout: should be a duration like "500ms"'),
        ('[spark]\nmastr = "local"', 'spark.mastr: there is no such key; did you mean "master"?'),
        ('[spark]\nmaster = "none"\nmemory = "1g"', "no other keys are allowed"),
        ('[tables."public.a"]\nmode = "history"', 'tables."public.a".mode: there is no such key'),
        ('[schema_changes]\nrename_table = "s3cret"', "schema_changes.rename_table: should be 'follow' or 'keep'"),
        ('[tables."a.".schema_changes]\nrename_table = "keep"', "invalid table pattern: 'a.'"),
        ('[[index]]\nname = "x"', "index.specification: is missing"),
        ('[[index]]\nspecifiction = "x"', 'did you mean "specification"?'),
        ('[[index]]\nspecification = "x"', "[[index]] needs a [sink]"),
        ('[sink]\ntype = "memory"', "[sink] needs an [[index]]"),
    ],
)
def test_what_cannot_be_used_is_named_with_file_and_key(load, line, says):
    message = refusal(load, f"{SMALLEST}\n{line}")
    assert says in message
    assert "penstock.toml" in message
    assert "s3cret" not in message


def test_a_pattern_is_checked_before_anything_starts(load):
    message = refusal(load, SMALLEST.replace("[source]", '[source]\nexclude = ["a.b", "a.b.c"]'))
    assert "exclude" in message
    assert "should be a table or a pattern. Write schema.table" in message


def test_a_nested_key_gets_a_suggestion_too(load):
    message = refusal(load, SMALLEST.replace('id = "shop"', 'id = "shop"\nspool = {max_byte = 1}'))
    assert 'pipeline.spool.max_byte: there is no such key; did you mean "max_bytes"?' in message


def test_all_errors_are_told_at_once(load):
    message = refusal(load, '[pipeline]\nid = "a b"\n[source]\n[destination]\ntype = "memory"\n')
    assert "has 2 errors" in message
    assert "pipeline.id: should have 1 to 100 letters" in message
    assert "source.url: is missing" in message


def test_each_table_can_have_its_own_rule_for_renames(load):
    config = load(
        SMALLEST
        + """
[schema_changes]
rename_table = "follow"
[tables."public.a".schema_changes]
rename_table = "keep"
"""
    )
    assert config.pipeline.rename_tables == RenameRules(RenameTable.FOLLOW, {"public.a": RenameTable.KEEP})
    assert load(SMALLEST).pipeline.rename_tables == RenameRules()


def test_empty_table_sections_are_fine(load):
    assert load(SMALLEST + '[tables."public.a"]\n').pipeline.id == "shop"


def test_the_environment_is_put_in(load):
    config = load(SMALLEST.replace("reader@", "reader:${PW}@") + 'compression = "$${x}"', PW="hunter2hunter2")
    assert config.pipeline.source.parameters()["password"] == "hunter2hunter2"
    assert config.outputs[0].destination_options["compression"] == "${x}"
    assert "hunter2" not in repr(config)


def test_a_variable_that_is_not_set_is_an_error(load):
    message = refusal(load, SMALLEST.replace("reader@", "reader:${PW}@"), OTHER="x")
    assert "source.url: the environment variable PW is not set" in message


def test_a_variable_cannot_become_a_key(load):
    config = load(SMALLEST.replace('"lake"', '"${P}"'), P='x"\nmore = 1')
    assert set(config.outputs[0].destination_options) == {"path"}


@pytest.mark.parametrize(
    "text",
    [
        'a = "hunter2',
        SMALLEST.replace("reader@db", "reader:hunter2@/@x@db:hunter2"),
        SMALLEST.replace('"parquet"', '"parquet"\n[state]\nurl = {hunter2 = 1}\n[spark]\nhunter2x = {a=[1]}'),
    ],
)
def test_errors_do_not_show_values(load, text):
    message = refusal(load, text)
    assert "hunter2" not in message.replace("hunter2x", "")


def test_what_came_from_the_environment_is_scrubbed_from_later_errors(load):
    config = load(SMALLEST.replace('"lake"', '"${P}"'), P="very-secret")
    with pytest.raises(ConfigError) as raised, config.discreet():
        raise ConfigError("cannot write to very-secret", hint="Look at very-secret.")
    assert "very-secret" not in f"{raised.value} {raised.value.message} {raised.value.hint}"


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="there is no config file") as raised:
        load_config(tmp_path / "none.toml")
    assert "PENSTOCK_CONFIG" in raised.value.hint


def test_options_of_a_destination_are_checked(load):
    config = load(SMALLEST + "compresion = 1\n")
    with pytest.raises(ConfigError, match="did you mean 'compression'"):
        config.create_destination()


@pytest.mark.parametrize(
    ("text", "size"), [(12, 12), ("0", None), ("4GB", 4 << 30), ("1.5 kB", 1536), ("2TiB", 2 << 40), (True, None)]
)
def test_sizes(text, size):
    if size is None:
        with pytest.raises(ValueError, match="should be a size"):
            parse_size(text)
    else:
        assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(3, 3), ("500ms", 0.5), ("15min", 900), ("15m", 900), ("1h", 3600), ("2d", 172800), ("h", None)],
)
def test_durations(text, seconds):
    if seconds is None:
        with pytest.raises(ValueError, match="should be a duration"):
            parse_duration(text)
    else:
        assert parse_duration(text).total_seconds() == seconds


TWO = """
[pipeline]
id = "shop"
[source]
url = "postgresql://reader@db/shop"
[[destination]]
name = "tables"
type = "parquet"
path = "lake"
[[destination]]
name = "copy"
type = "parquet"
path = "second"
"""


def test_a_destination_may_say_how_often_it_commits(load):
    config = load(SMALLEST.replace('"parquet"', '"delta"') + 'commit_interval = "200ms"')
    assert config.pipeline.batches.interval == 0.2
    assert config.create_destination().commit_interval == 0.2
    assert "a duration" in refusal(load, SMALLEST + 'commit_interval = "soon"')


def test_several_destinations_share_all_but_their_state(load, tmp_path):
    config = load(TWO)
    first, second = config.outputs
    assert (first.name, second.name) == ("tables", "copy")
    assert second.destination_options == {"path": str(tmp_path / "second")}
    assert first.settings.slot == second.settings.slot
    assert (first.settings.output_id, second.settings.output_id) == ("shop", "shop:copy")
    assert config.output("copy") == second
    with pytest.raises(ConfigError, match="no destination 'search'"):
        config.output("search")


def test_several_destinations_need_different_names(load):
    assert "destination: each of several destinations needs its own name" in refusal(
        load, TWO.replace('"copy"', '"tables"')
    )
    assert "destination: needs at least one destination" in refusal(
        load, TWO[: TWO.index("[[")].replace("[pipeline]", "destination = []\n[pipeline]")
    )


def test_an_error_says_which_of_several_destinations_is_meant(load):
    assert "destination.1.type: is missing" in refusal(
        load, TWO.replace('name = "copy"\ntype = "parquet"', 'name = "copy"')
    )


RULES = """
[hash]
key = "${KEY}"
[tables."public.users"]
where = "country = 'DE'"
[tables."public.users".columns]
email = { hash = true, rename = "email_hash" }
phone = { keep_last = 4 }
password = { exclude = true }
[tables."public.users".types.columns.email]
out_of_range = "null"
"""


def test_rules_for_columns_and_rows(load):
    secret = "a secret of 16 or more"
    config = load(SMALLEST + RULES, KEY=secret)
    rules = config.pipeline.transforms.rules["public.users"]
    assert str(rules) == (
        "email hashed, renamed to email_hash; phone masked except the last 4 characters; password excluded; "
        "only rows where country = 'DE'"
    )
    assert rules.key == secret.encode()
    assert secret not in repr(config)
    # The destination knows the column by its new name.
    assert config.pipeline.types.of("public.users", "email_hash").out_of_range is OutOfRange.NULL


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (RULES.replace("[hash]", "[hush]"), "hush: there is no such key"),
        (RULES.replace('[hash]\nkey = "${KEY}"', ""), "[tables] hashes a column, which needs [hash] key"),
        (RULES.replace("${KEY}", "short"), "hash.key: should have at least 16 characters"),
        (RULES.replace("keep_last = 4", "keep_last = 0"), "keep_last: should be greater than or equal to 1"),
        (RULES.replace("keep_last = 4", 'keep_last = 4, mask = "x"'), "keep_last and mask cannot be combined"),
        (RULES.replace("exclude = true", 'exclude = true, rename = "x"'), "exclude and rename cannot be combined"),
        (RULES.replace("exclude = true", "exclude = false"), "exclude: can only be true; remove it otherwise"),
        (RULES.replace("{ exclude = true }", "true"), "password: should be a section with keys of its own, like {"),
        (RULES.replace("keep_last = 4", 'keep_last = "x"'), "keep_last: should be a whole number"),
        (RULES.replace("country = 'DE'", "country like 'D%'"), "has 'like', which filters do not support"),
        (RULES.replace("country = 'DE'", "country like 'D%'"), "docs/guides/columns.md"),
        (RULES.replace("{ exclude = true }", "{}"), "needs one of exclude, hash, null, mask, keep_last, rename"),
        (RULES.replace("exclude", "exlude"), 'there is no such key; did you mean "exclude"?'),
        (RULES.replace("country = 'DE'", "lower(country) = 'DE'"), '"public.users".where: the filter calls a function'),
        (RULES.replace('"public.users"', '"public.users.x"'), "public.users.x"),
    ],
)
def test_rules_that_cannot_be_used_are_refused(load, text, says):
    found = refusal(load, SMALLEST + text, KEY="a secret of 16 or more")
    assert says in found
    assert "16 or more" not in found
