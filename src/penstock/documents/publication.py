"""What the publication has to send for documents to stay up to date."""

from __future__ import annotations

from collections.abc import Collection

from penstock.documents.builder import PostgresDocuments
from penstock.errors import ConfigError, PublicationChanged
from penstock.source.catalog import load_tables
from penstock.source.publications import published_tables, require_publication
from penstock.values import TypeSettings
from penstock.values.policy import merging_setting


def require_published(documents: PostgresDocuments, published: Collection[str], publication: str) -> None:
    """Raise `PublicationChanged` unless every table is published, as a whole or partition by partition."""
    missing: set[str] = set()
    for name in {name for each in documents.specifications.values() for name in each.tables()}:
        leaves = documents.catalog.table(name).leaves
        if str(name) not in published and not (leaves and all(str(leaf) in published for leaf in leaves)):
            missing.add(str(name))
    if missing:
        names = ", ".join(sorted(missing))
        raise PublicationChanged(
            f"publication {publication!r} does not include {names}, which documents need",
            hint="Add them to source.tables; if Penstock does not manage the publication, alter it.",
            tables=sorted(missing),
        )


def require_whole(documents: PostgresDocuments, publication: str) -> None:
    """Raise `PublicationChanged` if the publication omits operations, rows, or columns by which documents are found."""
    omitted = sorted(
        {"insert", "update", "delete", "truncate"} - require_publication(documents.connection, publication).operations
    )
    if omitted:
        raise PublicationChanged(
            f"publication {publication!r} does not send {' and '.join(omitted)}, so documents would miss these changes",
            hint=f"Run: alter publication {publication} set (publish = 'insert, update, delete, truncate'); then start "
            "the pipeline again, which rebuilds the indexes.",
        )
    wanted = {str(name): each for name, each in documents.wanted.items()}
    published = [each for each in published_tables(documents.connection, publication) if str(each) in wanted]
    listed = load_tables(documents.connection, [each.oid for each in published if each.column_attnums is not None])
    for each in published:
        if each.row_filter is not None:
            raise PublicationChanged(
                f"publication {publication!r} sends only some rows of {each}, so documents would miss the others",
                hint="Publish the table without a row filter; specifications have filters of their own.",
                tables=[str(each)],
            )
        if each.oid in listed:
            sent = {
                column.name for column in listed[each.oid].attributes if column.attnum in (each.column_attnums or ())
            }
            missing = sorted({*wanted[str(each)].columns} - sent)
            if missing:
                names = ", ".join(missing)
                raise PublicationChanged(
                    f"publication {publication!r} does not send {names} of {each}, which documents need",
                    hint="Add them to the column list of the publication, or publish the table without one.",
                    tables=[str(each)],
                )


def require_exact(documents: PostgresDocuments, types: TypeSettings) -> None:
    """Raise `ConfigError` if `[types]` makes different keys the same: the stream has their values in these types."""
    kept = types.keeping()
    for name, wanted in documents.wanted.items():
        for column in documents.catalog.table(documents.catalog.top(name)).select(wanted.columns):
            chosen = kept.of(str(name), column.name)
            setting = merging_setting(column.type, column.modifier, chosen)
            if setting is not None:
                value = getattr(chosen, setting)
                raise ConfigError(
                    f'{name}: {setting} = "{value}" cannot be used for column {column.name!r}, by which documents are '
                    "found: different values would become the same",
                    hint=f'Set {setting} = "string" in [tables."{name}".types.columns."{column.name}"].',
                )
