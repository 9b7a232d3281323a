"""The config file that `penstock init` writes: short, commented, and without a password."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict, make_conninfo

DEFAULT_MASTER = "local[*]"
_USER = re.compile(r"^(postgres(?:ql)?://[^:/@?#]+)@")
_USER_INFO = re.compile(r"^(postgres(?:ql)?://[^:/@?#]*):[^@]*@")


@dataclass(frozen=True, slots=True)
class Choices:
    """What a person has chosen."""

    pipeline_id: str
    url: str
    """As written to the file, with a reference in place of the password."""
    password_variable: str | None
    """The environment variable that the URL refers to; None if it has no password."""
    tables: tuple[str, ...] = ("*.*",)
    exclude: tuple[str, ...] = ()
    destination: str = "delta"
    path: str | None = "lake"
    master: str = DEFAULT_MASTER


@dataclass(frozen=True, slots=True)
class PublicUrl:
    """A URL that may be written to a file."""

    text: str
    password: str | None
    """The removed password, as the variable has to hold it."""


def public_url(url: str, variable: str) -> PublicUrl:
    """The URL with a reference to a variable in place of its password."""
    parameters = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    password = parameters.pop("password", None)
    if password is None:
        return PublicUrl(_escaped(url), None)
    if "password=" not in url.rpartition("@")[2]:
        reference = _USER_INFO.sub(lambda found: f"{found[1]}:${{{variable}}}@", _escaped(url), count=1)
        return PublicUrl(reference, quote(password, safe=""))
    rest = _escaped(make_conninfo("", **parameters))
    quoted = password.replace("\\", "\\\\").replace("'", "\\'")
    return PublicUrl(f"{rest} password='${{{variable}}}'", quoted)


def with_password(url: str, password: str) -> str:
    """The URL with a password added."""
    found = _USER.match(url)
    if found is None:
        return make_conninfo(url, password=password)
    return f"{found[1]}:{quote(password, safe='')}@{url[found.end() :]}"


def usable_id(database: str) -> str:
    """A pipeline's id made from the name of a database."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", database).lstrip("_.-")[:100] or "pipeline"


def password_variable(pipeline_id: str) -> str:
    """The environment variable for a pipeline's password: `SHOP_PASSWORD`."""
    name = re.sub(r"[^A-Z0-9]", "_", pipeline_id.upper())
    return f"{'_' if name[0].isdigit() else ''}{name}_PASSWORD"


def render_config(choices: Choices) -> str:
    """The file's text."""
    return _TEMPLATE.format(
        id=_toml(choices.pipeline_id),
        url_comment=_url_comment(choices),
        url=_toml(choices.url),
        tables=_toml_list(choices.tables),
        exclude=f"exclude = {_toml_list(choices.exclude)}" if choices.exclude else '# exclude = ["public.tmp_*"]',
        master=f"{'# ' if choices.master == DEFAULT_MASTER else ''}master = {_toml(choices.master)}",
        type=_toml(choices.destination),
        path="" if choices.path is None else f"path = {_toml(choices.path)}\n",
        options=_OPTIONS.get(choices.destination, ""),
    )


def _url_comment(choices: Choices) -> str:
    if choices.password_variable is None:
        return "# The password comes from PGPASSWORD or ~/.pgpass, on every machine that reads tables."
    return f"# The password comes from the environment variable {choices.password_variable}; it is in no file."


def _escaped(url: str) -> str:
    return url.replace("${", "$${")


def _toml(text: str) -> str:
    # Every JSON string is a TOML string.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_list(texts: tuple[str, ...]) -> str:
    return f"[{', '.join(_toml(text) for text in texts)}]"


_OPTIONS = {
    "delta": """# "mirror": rows equal the source; "history": every change; "soft_delete": deleted rows stay, marked.
# mode = "mirror"
# false for readers that do not support deletion vectors (pyarrow).
# deletion_vectors = true
""",
}

_TEMPLATE = """# A Penstock pipeline, written by `penstock init`. Every key: docs/reference/config.md.
# `penstock schema config` prints its JSON Schema, for completion and checks in editors.
#
#   penstock check         is the server ready?
#   penstock run --plan    what would be created and copied
#   penstock run           copy, then apply every change
#   penstock status        the state of the pipeline

[pipeline]
# Also names the slot and the publication on the server: penstock_<id>.
id = {id}
# Where captured changes wait for the destination. Relative paths are relative to this file.
# spool = {{path = ".penstock/<id>/spool", max_bytes = "4GB"}}

[source]
{url_comment}
url = {url}
# Tables by name or pattern; new tables that match are added automatically.
tables = {tables}
{exclude}

# [state]
# Where positions are stored; by default a file next to the spool.
# url = "postgresql://…"

[spark]
# "local[*]" uses all cores of this machine, spark://host:7077 a cluster. "none" runs everything in one process without
# Spark and Java, which is enough for small databases. Without master, that of spark-submit or spark-defaults.conf is
# used, or else "local[*]".
{master}

[destination]
type = {type}
{path}{options}
# Health checks, metrics for Prometheus and a page for people; needs: pip install 'penstock[web]'.
# [server]
# port = 8321
# Allows actions, such as pause, resync and verify. Without it, everything can be seen and nothing done.
# token = "${{PENSTOCK_TOKEN}}"
"""
