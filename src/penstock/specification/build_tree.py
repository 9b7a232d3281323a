"""Turns validated models into plain objects: fills in defaults, resolves names of columns and schemas.

Reports mistakes that a single model cannot see: a junction's columns outside a many-to-many relation, keys of different
lengths, a soft delete by a field without a column.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from penstock.source.patterns import TableName
from penstock.specification.models import (
    AggregateModel,
    BelongsToModel,
    ColumnModel,
    ConstantModel,
    CustomModel,
    FieldModel,
    FilterModel,
    GeoModel,
    HasManyModel,
    HasOneModel,
    ManyToManyModel,
    MapModel,
    ObjectModel,
    OrderModel,
    ScalarModel,
    SpecificationModel,
    ThroughModel,
    VectorModel,
    fold_identifier,
)
from penstock.specification.tree import (
    Aggregate,
    Constant,
    Field,
    Filter,
    Geo,
    Group,
    IndexSpecification,
    Join,
    Junction,
    Operation,
    OrderBy,
    Relation,
    Scalar,
    ScalarType,
    SoftDelete,
    Transform,
    Verb,
    field_paths,
)
from penstock.specification.yaml_positions import Path

_DYNAMIC = re.compile(
    r"number_of_replicas|auto_expand_replicas|refresh_interval|max_\w+|default_pipeline|final_pipeline|priority|"
    r"requests\.cache\.enable|query\.default_field|mapping\.\w+\.limit|"
    r"(search|indexing|routing|highlight|merge|blocks|unassigned)\..+"
)
"""Settings that an existing index can get. Any other needs a new one, which is always right."""
_OWN_SETTINGS = {
    "gc_deletes": "Penstock sets it, so that an older document never replaces a removal",
    "translog.durability": "Penstock sets it, so that no acknowledged document is lost",
}

Mistakes = list[tuple[Path, str]]
_JoinModel = BelongsToModel | HasOneModel | HasManyModel | ManyToManyModel


def build_tree(
    model: SpecificationModel, name: str, place: Callable[[Path], str]
) -> tuple[IndexSpecification, Mistakes]:
    """Return the specification, and its mistakes; with mistakes it must not be used. `place` is for messages."""
    builder = _Builder(model.schema_, place)
    primary_key = tuple(model.primary_key or ())
    fields = builder.fields(model.fields, primary_key, False, ())
    filters = builder.filters(model.filters, ("filters",))
    settings = builder.settings(model.settings)
    builder.check_excludes(model.source_excludes, fields)
    tree = IndexSpecification(
        name=name,
        table=TableName(model.schema_, model.table),
        fields=fields,
        primary_key=primary_key,
        doc_id=tuple(model.doc_id or ()),
        filters=filters,
        soft_delete=builder.soft_delete(model, fields),
        transform=model.transform or "",
        routing=model.routing or "",
        settings={name: value for name, value in settings.items() if not _DYNAMIC.fullmatch(name)},
        dynamic_settings={name: value for name, value in settings.items() if _DYNAMIC.fullmatch(name)},
        source_excludes=tuple(model.source_excludes),
    )
    return tree, builder.mistakes


class _Builder:
    def __init__(self, schema: str, place: Callable[[Path], str]) -> None:
        self._schema = schema
        self._place = place
        self.mistakes: Mistakes = []

    def fields(
        self, models: Sequence[FieldModel], parent_key: tuple[str, ...], junction: bool, path: Path
    ) -> tuple[Field, ...]:
        return tuple(
            self._field(each, parent_key, junction, (*path, "fields", index)) for index, each in enumerate(models)
        )

    def filters(self, models: Sequence[FilterModel], path: Path, junction: bool = False) -> tuple[Filter, ...]:
        for index, each in enumerate(models):
            self._check_junction(each.from_, junction, (*path, index, "from"))
        return tuple(
            Filter(
                column=each.column or "",
                operator=each.op or "",
                values=tuple(_text(value) for value in (each.value if isinstance(each.value, list) else [each.value]))
                if each.value is not None
                else (),
                raw=each.raw or "",
                junction=each.from_ is not None,
            )
            for each in models
        )

    def settings(self, written: dict[str, Any]) -> dict[str, Any]:
        """Return settings by their full names without `index.`, whether they were nested or not."""
        found: dict[str, Any] = {}
        for path, value in _leaves(written, ()):
            name = ".".join(path).removeprefix("index.")
            if name in _OWN_SETTINGS:
                self.mistakes.append((("settings", *path), _OWN_SETTINGS[name]))
            found[name] = value
        return found

    def check_excludes(self, paths: Sequence[str], fields: tuple[Field, ...]) -> None:
        known = list(field_paths(fields))
        for index, each in enumerate(paths):
            if each not in known:
                near = difflib.get_close_matches(each, known, n=1)
                hint = f'; did you mean "{near[0]}"?' if near else ""
                self.mistakes.append((("source_excludes", index), f"there is no field {each!r}{hint}"))

    def soft_delete(self, model: SpecificationModel, fields: Sequence[Field]) -> SoftDelete | None:
        if model.soft_delete is None:
            return None
        when = self.filters(model.soft_delete.when, ("soft_delete", "when"))
        column = model.soft_delete.column
        if column is None:
            named = [each for each in fields if each.name == model.soft_delete.field]
            if not named or not isinstance(named[0], Scalar) or not named[0].column:
                self.mistakes.append((("soft_delete", "field"), "must name a field of the root that has a column"))
                return None
            column = named[0].column
        return SoftDelete(column, when)

    def _field(self, model: FieldModel, parent_key: tuple[str, ...], junction: bool, path: Path) -> Field:
        match model:
            case ColumnModel():
                return self._scalar(model, junction, path)
            case GeoModel():
                column = "" if model.lat else model.column or fold_identifier(model.name)
                return Geo(model.name, model.lat or "", model.lon or "", column, model.required, model.options)
            case ConstantModel():
                return Constant(model.name, model.value)
            case ObjectModel():
                return Group(model.name, self.fields(model.fields, parent_key, junction, path), model.options)
            case AggregateModel():
                return self._aggregate(model, parent_key, path)
            case _:
                return self._join(model, parent_key, path)

    def _scalar(self, model: ScalarModel | CustomModel | VectorModel | MapModel, junction: bool, path: Path) -> Scalar:
        self._check_junction(model.from_, junction, (*path, "from"))
        plain = Scalar(
            name=model.name,
            type=ScalarType(model.kind),
            column=model.column or fold_identifier(model.name),
            junction=model.from_ is not None,
            required=model.required,
            options=model.options,
        )
        match model:
            case ScalarModel():
                expressed = {"expression": model.expression, "column": "", "place": self._place((*path, "expression"))}
                return replace(
                    plain,
                    transforms=tuple(Transform(each) for each in model.transforms),
                    default=model.default,
                    variants=tuple(model.variants or ()),
                    **(expressed if model.expression else {}),
                )
            case CustomModel():
                postgres = tuple(model.postgres)
                return replace(plain, default=model.default, postgres=postgres, opensearch=model.opensearch)
            case VectorModel():
                return replace(plain, dimensions=model.dimensions)
            case MapModel():
                return replace(plain, values=ScalarType(model.values))

    def _join(self, model: _JoinModel, parent_key: tuple[str, ...], path: Path) -> Join:
        key = tuple(model.primary_key)
        through = isinstance(model, ManyToManyModel)
        own, parent = key, parent_key
        if isinstance(model, BelongsToModel):
            parent = tuple(model.column or [fold_identifier(model.name)])
            self._check_lengths(parent, key, (*path, "column"))
        elif isinstance(model, HasOneModel | HasManyModel):
            own = tuple(model.foreign_key)
            self._check_lengths(own, parent_key, (*path, "foreign_key"))
        relation = Relation(
            table=TableName(model.schema_ or self._schema, model.table),
            primary_key=key,
            parent_columns=parent,
            columns=own,
            junction=self._junction(model.through, parent_key, key, (*path, "through")) if through else None,
            filters=self.filters(model.filters, (*path, "filters"), through),
            order_by=() if isinstance(model, BelongsToModel) else self._order(model.order_by, through, path),
            limit=model.limit if isinstance(model, HasManyModel | ManyToManyModel) else None,
        )
        fields = self.fields(model.fields, key, through, path)
        required = isinstance(model, BelongsToModel | HasOneModel) and model.required
        return Join(model.name, Verb(model.kind), relation, fields, required, model.options)

    def _aggregate(self, model: AggregateModel, parent_key: tuple[str, ...], path: Path) -> Aggregate:
        foreign_key = tuple(model.foreign_key or ())
        if foreign_key:
            self._check_lengths(foreign_key, parent_key, (*path, "foreign_key"))
        relation = Relation(
            table=TableName(model.schema_ or self._schema, model.table),
            primary_key=(),
            parent_columns=parent_key,
            columns=foreign_key,
            junction=self._junction(model.through, parent_key, (), (*path, "through")) if model.through else None,
            filters=self.filters(model.filters, (*path, "filters"), model.through is not None),
        )
        value_type = model.value_type or model.element_type
        return Aggregate(
            model.name,
            Operation(model.kind),
            relation,
            model.column or "",
            ScalarType(value_type) if value_type else None,
            model.options,
        )

    def _junction(self, model: ThroughModel, parent_key: tuple[str, ...], key: tuple[str, ...], path: Path) -> Junction:
        left, right = tuple(model.left_key), tuple(model.right_key)
        self._check_lengths(left, parent_key, (*path, "left_key"))
        self._check_lengths(right, key, (*path, "right_key"))
        return Junction(TableName(model.schema_ or self._schema, model.table), left, right)

    def _order(self, models: Sequence[OrderModel], junction: bool, path: Path) -> tuple[OrderBy, ...]:
        for index, each in enumerate(models):
            self._check_junction(each.from_, junction, (*path, "order_by", index, "from"))
        return tuple(OrderBy(each.column, each.direction == "desc", each.from_ is not None) for each in models)

    def _check_junction(self, source: str | None, junction: bool, path: Path) -> None:
        if source is not None and not junction:
            self.mistakes.append(
                (path, "there is no junction here: only 'many_to_many' and aggregates with 'through' have one")
            )

    def _check_lengths(self, columns: tuple[str, ...], key: tuple[str, ...], path: Path) -> None:
        """Compare the lengths of keys; those from the catalog are empty here and checked later."""
        if columns and key and len(columns) != len(key):
            self.mistakes.append((path, f"has {len(columns)} columns, but the referenced key has {len(key)}"))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _leaves(value: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, each in value.items():
        if isinstance(each, dict) and key != "analysis":
            yield from _leaves(each, (*path, key))
        else:
            yield (*path, key), each
