"""`penstock index` as people run it, on the shop's database."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.documents.mapping import index_mapping
from penstock.specification import load_specification
from penstock.testing.shop import create_shop, fill_shop
from tests.integration.documents.opensearch.conftest import batch_of
from tests.program import penstock
from tests.support.document_sink import FileSink

ROOT = Path(__file__).parents[3]


class Desk:
    """A folder with the example specifications and a config for a shop."""

    def __init__(self, database: Any, folder: Path) -> None:
        self.database = database
        self.folder = folder
        shutil.copytree(ROOT / "examples/search", folder, dirs_exist_ok=True)
        self.configure('type = "counting"')

    def configure(self, sink: str) -> None:
        (self.folder / "penstock.toml").write_text(
            f"""
            [pipeline]
            id = "shop"
            [source]
            url = "${{SOURCE_URL}}"
            [spark]
            master = "none"
            [[index]]
            specification = "customers.schema.yml"
            [[index]]
            specification = "products.schema.yml"
            failure_policy = "skip"
            [sink]
            {sink}
            """
        )

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        everything = {**os.environ, "SOURCE_URL": self.database.dsn, "COLUMNS": "180", **environment}
        return penstock("index", *arguments, environment=everything, folder=self.folder)

    def specify(self, name: str, text: str) -> None:
        (self.folder / f"{name}.schema.yml").write_text(text)


@pytest.fixture
def desk(database: Any, tmp_path: Path) -> Desk:
    with database.connect() as connection:
        connection.autocommit = True
        create_shop(connection)
        fill_shop(connection, orders=200)
    return Desk(database, tmp_path)


def test_what_fits_ends_with_0_and_says_what_could_be_better(desk: Desk) -> None:
    result = desk.run("check")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "customers, products: ready" in result.stdout
    assert "create index concurrently on shop.order_items (sku)" in result.stdout
    assert "the server does not send customer_id of deleted and moved rows of shop.orders" in result.stdout
    assert "alter table shop.order_items replica identity full" in result.stdout
    desk.database.execute("create index on shop.order_items (sku)")
    report = json.loads(desk.run("check", "products", "--json").stdout)
    assert report["ready"] is True
    [index] = report["indexes"]
    assert index["index"] == "products"
    assert [each["severity"] for each in index["checks"]] == ["info"]


def test_what_does_not_fit_ends_with_1_and_names_the_remedy(desk: Desk) -> None:
    text = (desk.folder / "products.schema.yml").read_text()
    desk.specify("products", text.replace("- text: name", "- text: nam").replace("- integer: stock", "- uuid: stock"))
    result = desk.run("check")
    assert result.returncode == 1
    assert "nam: shop.products has no column 'nam'; did you mean 'name'?" in result.stdout
    assert "stock: shop.products.stock is int4; a field of type 'uuid' cannot hold it" in result.stdout
    assert "not ready: products" in result.stdout
    report = json.loads(desk.run("check", "--json").stdout)
    assert {each["index"]: each["ready"] for each in report["indexes"]} == {"customers": True, "products": False}


def test_what_the_search_server_would_refuse_is_told_before_it_runs(desk: Desk, opensearch: Any) -> None:
    desk.configure(f'type = "opensearch"\nurl = "{opensearch.url}"')
    text = (desk.folder / "products.schema.yml").read_text()
    desk.specify("products", text + "settings: {number_of_shard: 3}\n")
    result = desk.run("check")
    assert result.returncode == 1
    assert "the sink would refuse the index: unknown setting [index.number_of_shard]" in " ".join(result.stdout.split())
    desk.specify("products", text + "settings: {number_of_shards: 3}\n")
    assert desk.run("check").returncode == 0
    desk.configure('type = "opensearch"\nurl = "http://127.0.0.1:1"')
    away = desk.run("check")
    assert away.returncode == 0, "the database is fine"
    assert "settings and mappings were not checked: the search server does not answer" in " ".join(away.stdout.split())


@pytest.mark.remedy("sink")
@pytest.mark.parametrize("sink", ["ndjson", "parquet", "delta"])
def test_a_sink_that_cannot_be_written_is_told_by_every_check_and_the_first_start_leaves_nothing(
    desk: Desk, sink: str
) -> None:
    (desk.folder / "documents").write_text("a file where the folder should be")
    desk.configure(f'type = "{sink}"\npath = "documents"')
    everything = {**os.environ, "SOURCE_URL": desk.database.dsn, "COLUMNS": "180"}
    before = sorted(path.name for path in desk.folder.iterdir())
    report = penstock("check", "--json", environment=everything, folder=desk.folder)
    assert report.returncode == 1
    (finding,) = [each for each in json.loads(report.stdout)["checks"] if each["id"] == "sink"]
    assert (finding["severity"], "cannot be written" in finding["what"]) == ("critical", True)
    assert desk.run("check").returncode == 1
    plan = penstock("run", "--plan", environment=everything, folder=desk.folder)
    assert plan.returncode == 1
    assert f"WOULD FAIL   {finding['what']}. {finding['remedy']}" in plan.stdout
    assert sorted(path.name for path in desk.folder.iterdir()) == before
    refused = penstock("run", "--once", environment=everything, folder=desk.folder)
    assert f"the start is refused: {finding['what']}" in refused.stderr
    assert desk.database.execute("select from pg_replication_slots where database = current_database()") == []
    (desk.folder / "documents").unlink()
    assert penstock("check", environment=everything, folder=desk.folder).returncode == 0
    assert not (desk.folder / "documents").exists(), "what it writes it removes again"


@pytest.mark.parametrize(("status", "severity"), [(401, "critical"), (403, "warning")])
def test_a_search_server_that_refuses_the_user_refuses_the_start_unless_it_may_only_not_ask(
    desk: Desk, status: int, severity: str
) -> None:
    """A user may be allowed to write documents, but not to ask what a template would give."""

    class Refuses(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.end_headers()

        do_GET = do_POST  # noqa: N815 (the name that the library calls)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        desk.configure(f'type = "opensearch"\nurl = "http://127.0.0.1:{server.server_port}"')
        everything = {**os.environ, "SOURCE_URL": desk.database.dsn}
        report = penstock("check", "--json", environment=everything, folder=desk.folder)
        server.shutdown()
    (finding,) = [each for each in json.loads(report.stdout)["checks"] if each["id"] == "sink"]
    assert (finding["severity"], report.returncode) == (severity, int(severity == "critical"))
    assert f"answered {status}" in finding["what"]


@pytest.mark.remedy("PublicationChanged")
def test_tables_that_a_publication_lacks_are_named_with_the_remedy(desk: Desk) -> None:
    path = desk.folder / "penstock.toml"
    path.write_text(
        path.read_text().replace(
            "[spark]", 'publication = "narrow"\n            manage_publication = false\n            [spark]'
        )
    )
    desk.database.execute("create publication narrow for table shop.products")
    report = json.loads(desk.run("check", "products", "--json").stdout)
    assert report["ready"] is False
    [critical] = [each for each in report["indexes"][0]["checks"] if each["severity"] == "critical"]
    assert critical["what"] == "publication narrow does not send changes of shop.order_items"
    assert critical["remedy"] == "Run: alter publication narrow add table shop.order_items;"
    desk.database.execute(critical["remedy"].removeprefix("Run: "))
    assert desk.run("check", "products").returncode == 0


@pytest.mark.remedy("SpecificationInvalid")
def test_a_specification_that_cannot_be_read_has_its_place(desk: Desk) -> None:
    good = (desk.folder / "products.schema.yml").read_text()
    desk.specify("products", "version: 1\ntable: products\nfilds: []\n")
    result = desk.run("check")
    assert result.returncode == 1
    assert 'products.schema.yml:3:1: filds: there is no such key; did you mean "fields"?' in result.stderr
    assert "Traceback" not in result.stderr
    desk.specify("products", good)
    (command,) = re.findall(r"run: penstock index (\w+)\.", result.stderr)
    assert desk.run(command).returncode == 0


def test_a_preview_is_the_document_as_it_is_now(desk: Desk) -> None:
    document = json.loads(desk.run("preview", "customers", "1").stdout)
    assert document["orderCount"] == len(document["orders"]) > 0
    assert document["orders"][0]["lines"][0]["product"]["name"]
    desk.database.execute("update shop.customers set name = 'Somebody Else' where id = 1")
    shown = json.loads(desk.run("preview", "customers", "1", "--json").stdout)
    assert (shown["index"], shown["id"], shown["document"]["name"]) == ("customers", "1", "Somebody Else")


def test_an_explanation_has_the_relations_the_paths_and_what_they_cost(desk: Desk) -> None:
    result = desk.run("explain", "customers", COLUMNS="120")
    assert result.returncode == 0, result.stderr
    for line in (
        "customers: a document for each row of shop.customers, by id",
        "│   └── lines: has_many shop.order_items, order_id = id above",
        "├── orderCount: count shop.orders, customer_id = id above",
        "Run: create index concurrently on shop.order_items (sku);",
    ):
        assert line in result.stdout
    assert "select distinct" not in result.stdout

    planned = desk.run("explain", "customers", "--plans")
    assert "find the documents of a changed row of shop.products" in planned.stdout
    assert "Scan" in planned.stdout

    desk.database.execute("create index on shop.order_items (sku)")
    desk.database.execute("create index on shop.orders (customer_id)")
    [index] = json.loads(desk.run("explain", "customers", "--json").stdout)["indexes"]
    assert index["findings"] == []
    paths = {each["table"]: (each["columns"], each["through"], each["in_relation_map"]) for each in index["paths"]}
    assert paths == {
        "shop.customers": (["id"], [], False),
        "shop.orders": (["customer_id"], ["shop.customers"], True),
        "shop.order_items": (["order_id"], ["shop.orders", "shop.customers"], False),
        "shop.products": (["sku"], ["shop.order_items", "shop.orders", "shop.customers"], False),
    }


def test_a_preview_shows_how_the_stored_document_differs(desk: Desk) -> None:
    desk.configure('type = "tests.support.document_sink:FileSink"\npath = "documents.db"')
    desk.specify("products", "version: 1\nschema: shop\ntable: products\nfields: [{keyword: sku}, {text: name}]\n")
    [(sku, name)] = desk.database.execute("select sku, name from shop.products order by sku limit 1")
    sink = FileSink(desk.folder / "documents.db")
    assert desk.run("preview", "products", "nothing", "--diff").returncode == 1, "on neither side"

    specification = load_specification(desk.folder / "products.schema.yml")
    sink.ensure_index(index_mapping(specification))
    sink.mark_seeded("products")
    missing = desk.run("preview", "products", sku, "--diff")
    assert (missing.returncode, f'+  "name": "{name}"' in missing.stdout) == (1, True)

    sink.write(batch_of("products", {sku: {"sku": sku, "name": name}}))
    sink.flush(True)
    equal = desk.run("preview", "products", sku, "--diff")
    assert (equal.returncode, equal.stdout) == (0, f"products {sku}: the stored document equals the database\n")

    desk.database.execute("update shop.products set name = 'renamed' where sku = %s", [sku])
    differs = desk.run("preview", "products", sku, "--diff")
    assert differs.returncode == 1
    assert f'-  "name": "{name}"' in differs.stdout
    assert '+  "name": "renamed"' in differs.stdout
    both = json.loads(desk.run("preview", "products", sku, "--diff", "--json").stdout)
    assert (both["equal"], both["stored"]["name"], both["built"]["name"]) == (False, name, "renamed")


def test_composite_keys_are_given_by_column_or_as_one(desk: Desk) -> None:
    desk.specify("products", "version: 1\nschema: shop\ntable: order_items\nfields: [{integer: quantity}]\n")
    order = desk.database.execute("select min(order_id) from shop.order_items where line = 2")[0][0]
    one = desk.run("preview", "products", str(order), "2", "--json")
    assert json.loads(one.stdout)["id"] == f"{order}:2"
    other = desk.run("preview", "products", f"{order}:2", "--json")
    assert json.loads(other.stdout)["document"] == json.loads(one.stdout)["document"]
    result = desk.run("preview", "products", "1", "2", "3")
    assert result.returncode == 1
    assert "identified by 2 values (order_id, line), but 3 were given" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("preview", "customers", "999999"), "index 'customers' has no document '999999'"),
        (("preview", "customers", "abc"), "documents are identified by id (int8)"),
        (("preview", "nothing", "1"), "the config has no index 'nothing'"),
        (("mapping", "nothing"), "hint: It has: customers, products."),
        (("check", "nothing"), "the config has no index 'nothing'"),
        (("rebuild", "customers"), "pipeline shop has not run yet"),
        (("diff",), "sink 'counting' keeps no documents"),
        (("check", "-c", "missing.toml"), "there is no config file 'missing.toml'"),
    ],
)
def test_errors_are_sentences(desk: Desk, arguments: tuple[str, ...], says: str) -> None:
    result = desk.run(*arguments)
    assert result.returncode == (2 if arguments[0] == "diff" else 1)
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_server_that_does_not_answer_is_named(desk: Desk) -> None:
    result = desk.run("check", SOURCE_URL="postgresql://reader:hunter2@127.0.0.1:1/shop")
    assert result.returncode == 1
    assert "127.0.0.1:1" in result.stderr
    assert "hunter2" not in result.stderr
    assert "keeps trying" not in result.stderr


def test_mapping_and_schema_need_no_database(desk: Desk) -> None:
    mapping = json.loads(desk.run("mapping", "customers", SOURCE_URL="host=nowhere").stdout)
    assert mapping["mappings"]["properties"]["orders"]["type"] == "nested"
    assert mapping["mappings"]["dynamic"] == "strict"
    schema = json.loads(desk.run("schema").stdout)
    assert "has_many" in schema["$defs"]


def test_indexes_are_listed_before_they_were_built(desk: Desk) -> None:
    result = desk.run("list")
    assert result.returncode == 0, result.stderr
    assert "not built" in result.stdout
    facts = json.loads(desk.run("list", "--json").stdout)
    assert (facts["pipeline"], facts["running"], facts["sink"]) == ("shop", False, "counting")
    assert [(each["index"], each["table"], each["seeded"]) for each in facts["indexes"]] == [
        ("customers", "shop.customers", False),
        ("products", "shop.products", False),
    ]
    assert not (desk.folder / ".penstock").exists(), "looking creates nothing"


def test_a_config_without_indexes_says_so(desk: Desk) -> None:
    (desk.folder / "penstock.toml").write_text(
        'pipeline.id = "shop"\nsource.url = "${SOURCE_URL}"\ndestination.type = "memory"\n'
    )
    result = desk.run("list")
    assert result.returncode == 1
    assert "penstock.toml has no [[index]]" in result.stderr


def test_the_shell_completes_the_names_of_indexes(desk: Desk) -> None:
    asked = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock index preview cu", "COMP_CWORD": "3"}
    everything = {**os.environ, "SOURCE_URL": desk.database.dsn, **asked}
    result = penstock(environment=everything, folder=desk.folder)
    assert result.stdout.split() == ["customers"]
