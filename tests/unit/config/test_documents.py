"""`[[index]]` and `[sink]`: indexes alone, beside tables, and what is wrong with them."""

from __future__ import annotations

import pytest

from penstock.config import load_config
from penstock.documents import FailurePolicy
from penstock.documents.mapping import index_mapping
from penstock.documents.sinks import CountingSink, StdoutSink
from penstock.errors import ConfigError

PIPELINE = """
[pipeline]
id = "shop"
[source]
url = "postgresql://reader@db/shop"
"""
SINK = """
[sink]
type = "counting"
"""
SEARCH = SINK.replace("counting", "opensearch")
INDEX = """
[[index]]
specification = "search/customers.schema.yml"
"""
TABLES = """
[destination]
type = "memory"
"""
CUSTOMERS = """
version: 1
table: customers
fields:
  - keyword: email
  - has_many: orders
    table: orders
    foreign_key: customer_id
    primary_key: id
    fields:
      - long: id
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "search").mkdir()
    (tmp_path / "search/customers.schema.yml").write_text(CUSTOMERS)

    def load_text(text: str, **environment: str):
        path = tmp_path / "penstock.toml"
        path.write_text(text)
        return load_config(path, environment)

    return load_text


def refusal(load, text: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load(text, **environment)
    return f"{raised.value.message} {raised.value.hint}"


def test_documents_alone_publish_only_the_tables_that_they_consist_of(load):
    config = load(PIPELINE + INDEX + SINK)
    assert config.outputs == ()
    assert config.pipeline.tables == ('"public"."customers"', '"public"."orders"')
    assert config.pipeline.output_id == "shop:documents"
    assert [each.name for each in config.every_output] == ["documents"]
    with config.open_store() as store:
        assert store.pipeline_id == "shop:documents"


def test_documents_beside_tables_are_one_more_output(load):
    config = load(PIPELINE + INDEX + SINK + TABLES)
    assert [each.name for each in config.every_output] == ["tables", "documents"]
    assert config.pipeline.tables == ("*.*",)
    assert config.pipeline.output_id == "shop"
    assert config.indexes.settings.slot == config.pipeline.slot


def test_what_is_said_of_an_index_and_the_sink_arrives(load):
    config = load(
        PIPELINE
        + INDEX
        + 'name = "people"\nfailure_policy = "skip"\n'
        + INDEX
        + '[sink]\ntype = "stdout"\npretty = true\nmax_changes = 7\nmax_delay = "1s"\nskip_backfill = true\n'
    )
    documents = config.indexes
    assert [each.name for each in documents.indexes] == ["people", "customers"]
    assert documents.failure_policies.of("people") is FailurePolicy.SKIP
    assert documents.failure_policies.of("customers") is FailurePolicy.STOP
    assert (documents.batch.max_changes, documents.batch.max_delay, documents.skip_backfill) == (7, 1.0, True)
    assert isinstance(documents.create_sink(), StdoutSink)
    with pytest.raises(ConfigError, match="no index 'orders'"):
        documents.index("orders")


def test_a_config_without_indexes_says_so_to_whoever_needs_one(load):
    with pytest.raises(ConfigError, match=r"has no \[\[index\]\]"):
        assert load(PIPELINE + TABLES).indexes


def test_secrets_of_a_sink_come_from_the_environment_and_are_not_shown(load):
    config = load(PIPELINE + INDEX + '[sink]\ntype = "stdout"\npassword = "${PW}"\n', PW="hunter2hunter2")
    assert config.indexes.sink_options == {"password": "hunter2hunter2"}
    assert "hunter2" not in repr(config)


def test_paths_of_a_sink_are_relative_to_the_file(load, tmp_path):
    config = load(PIPELINE + INDEX + '[sink]\ntype = "opensearch"\nca_file = "ca.pem"\n')
    assert config.indexes.sink_options == {"ca_file": str(tmp_path / "ca.pem")}
    config = load(PIPELINE + INDEX + '[sink]\ntype = "delta"\npath = "s3://bucket/documents"\n')
    assert config.indexes.sink_options == {"path": "s3://bucket/documents"}


def test_indexes_and_their_aliases_are_named_by_environment(load):
    text = PIPELINE + INDEX + 'aliases = ["people"]\nid_prefix = "eu-"\n'
    text += '[sink]\ntype = "opensearch"\nindex_prefix = "${ENVIRONMENT}-"\nurl = "http://localhost:9200"\n'
    config = load(text, ENVIRONMENT="staging")
    [specification] = config.indexes.specifications
    assert (specification.name, specification.aliases) == ("staging-customers", ("staging-people",))
    mapping = index_mapping(specification)
    assert (mapping.index, mapping.aliases, mapping.id_prefix) == (
        "staging-customers",
        ("staging-people",),
        "eu-",
    )
    assert config.indexes.sink_options == {"url": "http://localhost:9200"}
    plain = index_mapping(load(text.replace('aliases = ["people"]', ""), ENVIRONMENT="x").indexes.specifications[0])
    assert plain.fingerprint == mapping.fingerprint, "names change no document"
    other = index_mapping(load(text.replace("eu-", "us-"), ENVIRONMENT="x").indexes.specifications[0])
    assert other.fingerprint != mapping.fingerprint, "all ids change"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (INDEX + 'aliases = ["People"]' + SINK, "index.0.aliases: 'People' is not a name that an index can have"),
        (INDEX + 'aliases = ["customers"]' + SEARCH, "its alias 'customers' is the name of an index; use another one"),
        (INDEX + 'id_prefix = "eu-"' + SINK, "index.0.id_prefix: the sink 'counting' does not support it"),
        (INDEX + SINK + 'index_prefix = "UP-"', "index.0.name: 'UP-customers' may have lowercase letters"),
        (INDEX, "[[index]] needs a [sink]"),
        (SINK + TABLES, "[sink] needs an [[index]]"),
        ("", "needs a [destination] for tables or an [[index]]"),
        (INDEX + SINK + TABLES + 'name = "documents"', "'documents' is reserved for the output of [[index]]"),
        (INDEX + SINK + INDEX + "failure_polcy = 1", 'index.1.failure_polcy: there is no such key; did you mean "fail'),
        (INDEX + 'failure_policy = "s3cret"' + SINK, "index.failure_policy: should be 'stop' or 'skip'"),
        (INDEX + INDEX + SINK, "duplicate index 'customers'"),
        (INDEX + 'name = "Customers"' + SINK, "lowercase letters"),
        (INDEX.replace("customers", "nothing") + SINK, "does not exist"),
        (INDEX + SINK + "max_changes = 0", "sink.max_changes: should be greater than or equal to 1"),
        (INDEX + SINK + 'max_delay = "soon"', "sink.max_delay: should be a duration"),
    ],
)
def test_what_cannot_be_used_is_named_with_file_and_key(load, text, says):
    message = refusal(load, PIPELINE + text)
    assert says in message
    assert "penstock.toml" in message
    assert "s3cret" not in message


def test_tables_that_are_left_out_are_named(load):
    narrow = PIPELINE + 'tables = ["public.customers"]\n'
    assert "index 'customers' needs public.orders, which" in refusal(load, narrow + INDEX + SINK)
    without = PIPELINE + 'exclude = ["public.o*"]\n'
    assert "public.orders" in refusal(load, without + INDEX + SINK + TABLES)
    foreign = narrow + "manage_publication = false\n"
    assert load(foreign + INDEX + SINK).pipeline.tables == ("public.customers",)


def test_errors_in_specifications_have_their_place_all_at_once(load, tmp_path):
    (tmp_path / "search/customers.schema.yml").write_text(CUSTOMERS.replace("keyword: email", "keywrd: email"))
    (tmp_path / "search/second.schema.yml").write_text("version: 1\ntable: t\nfilds: []\n")
    message = refusal(load, PIPELINE + INDEX + '[[index]]\nspecification = "search/second.schema.yml"' + SINK)
    assert "customers.schema.yml:5:5: fields[0]: the field has no known type; did" in message
    assert 'second.schema.yml:3:1: filds: there is no such key; did you mean "fields"?' in message


def test_a_key_of_the_sink_gets_a_suggestion_too(load):
    config = load(PIPELINE + INDEX + SINK + "max_change = 3\n")
    with pytest.raises(ConfigError, match="sink 'counting' has no option 'max_change'; did you mean 'max_changes'"):
        config.indexes.create_sink()
    assert isinstance(load(PIPELINE + INDEX + SINK).indexes.create_sink(), CountingSink)


def test_names_in_other_schemas_are_published_as_they_are_written(load, tmp_path):
    other = CUSTOMERS.replace("table: orders", """schema: '"Sales"'\n    table: '"Order*s"'""")
    (tmp_path / "search/customers.schema.yml").write_text(other)
    assert load(PIPELINE + INDEX + SINK).pipeline.tables == ('"Sales"."Order*s"', '"public"."customers"')


def test_polling_is_for_documents_alone_and_names_its_cursors(load):
    polled = '[polling]\ncursor = "updated_at"\ninterval = "5s"\ntables = {orders = "xmin"}\n'
    polling = load(PIPELINE + INDEX + SINK + polled).indexes.polling
    assert (polling.cursor, polling.settings.interval, polling.settings.overlap) == ("updated_at", 5.0, 60.0)
    assert {str(name): cursor for name, cursor in polling.cursors.items()} == {"public.orders": "xmin"}
    assert "[polling] is only for documents" in refusal(load, PIPELINE + INDEX + SINK + TABLES + polled)
    assert "needs a [destination]" in refusal(load, PIPELINE + "[polling]\n")
    assert "no index uses a table that matches" in refusal(
        load, PIPELINE + INDEX + SINK + polled.replace("orders", "xs")
    )
