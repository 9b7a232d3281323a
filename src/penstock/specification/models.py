"""What an index specification may contain, and its JSON Schema for editors.

docs/reference/index-specification.md describes every key. Fields are written type first (`- keyword: email`); `loading`
rewrites that to `kind` and `name` before validation, and turns the result into the plain objects of `tree`. Names of
tables and columns follow Postgres: unquoted names are folded to lower case, names in double quotes are kept.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from penstock.specification.tree import ScalarType

_PLAIN = re.compile(r"[a-z_][a-z0-9_$]*")
_QUOTED = re.compile(r'"((?:[^"]|"")+)"')
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_NAME_LIMIT = 63

ScalarKind = Literal[
    "text", "identifier", "keyword", "enum", "uuid", "boolean", "short", "integer", "long", "float", "double",
    "decimal", "date", "timestamp", "binary", "json",
]  # fmt: skip
MapValues = Literal[
    "text", "identifier", "keyword", "enum", "uuid", "short", "integer", "long", "float", "double", "decimal",
    "date", "timestamp",
]  # fmt: skip
Operator = Literal[
    "eq", "neq", "lt", "lte", "gt", "gte", "like", "ilike", "in", "not_in", "between", "is_null", "is_not_null"
]
Constant = str | int | float | bool | None
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_FIELD = "Field"


def refuse(key: str, message: str) -> PydanticCustomError:
    """Return an error about one key of the model being validated."""
    return PydanticCustomError("key", "{message}", {"key": key, "message": message})


def fold_identifier(text: str) -> str:
    """Fold a name as Postgres does."""
    text = text.strip()
    quoted = _QUOTED.fullmatch(text)
    name = quoted[1].replace('""', '"') if quoted else text.lower()
    if not quoted and not _PLAIN.fullmatch(name):
        raise ValueError(
            f"{text!r} is not a plain name; write '\"{text}\"' if the table or column is really called that"
        )
    if len(name.encode()) > _NAME_LIMIT:
        raise ValueError(f"Postgres names have at most {_NAME_LIMIT} bytes")
    return name


def _check_field_name(text: str) -> str:
    if not _FIELD_NAME.fullmatch(text.strip()):
        raise ValueError("a field's name has at most 63 letters, digits and '_', and does not begin with a digit")
    return text.strip()


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Identifier = Annotated[str, AfterValidator(fold_identifier)]
_ONE_OR_MORE = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
Identifiers = Annotated[list[Identifier], BeforeValidator(_as_list), Field(min_length=1), WithJsonSchema(_ONE_OR_MORE)]
FieldName = Annotated[str, AfterValidator(_check_field_name)]


class Model(BaseModel):
    """Rejects unknown keys, and shows no values in errors. Built on first use: most commands need none."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True, defer_build=True)


class FilterModel(Model):
    """A condition: `{column, op, value}`, or `{raw}`."""

    column: Identifier | None = None
    op: Operator | None = None
    value: Any = None
    raw: str | None = None
    from_: Literal["junction"] | None = Field(None, alias="from")

    @model_validator(mode="after")
    def check_shape(self) -> FilterModel:
        if self.raw is not None:
            for key in ("column", "op", "value", "from"):
                if key in {("from" if each == "from_" else each) for each in self.model_fields_set}:
                    raise refuse(key, "cannot be combined with 'raw'")
            if not self.raw.strip():
                raise refuse("raw", "is empty")
            return self
        if self.column is None or self.op is None:
            missing = "column" if self.column is None else "op"
            raise refuse(missing, "is missing; a condition needs either 'column' and 'op', or 'raw'")
        self._check_value(self.op)
        return self

    def _check_value(self, op: str) -> None:
        given = "value" in self.model_fields_set
        if op in ("is_null", "is_not_null"):
            if given:
                raise refuse("value", f"must be omitted for '{op}'")
        elif not given:
            raise refuse("value", f"is missing; '{op}' needs it")
        elif op in ("in", "not_in", "between"):
            if not isinstance(self.value, list) or not all(_is_scalar(each) for each in self.value):
                raise refuse("value", f"must be a list of plain values for '{op}'")
            if op == "between" and len(self.value) != 2:
                raise refuse("value", "must have exactly two values for 'between'")
        elif not _is_scalar(self.value):
            raise refuse("value", f"must be a plain value for '{op}'")


class OrderModel(Model):
    """One column by which rows are ordered."""

    column: Identifier
    direction: Literal["asc", "desc"] = "asc"
    from_: Literal["junction"] | None = Field(None, alias="from")


class ThroughModel(Model):
    """The junction of a many-to-many relation."""

    table: Identifier
    schema_: Identifier | None = Field(None, alias="schema")
    left_key: Identifiers
    right_key: Identifiers


class ColumnModel(Model):
    """What all fields with a column of the row have."""

    name: FieldName
    column: Identifier | None = None
    from_: Literal["junction"] | None = Field(None, alias="from")
    required: bool = False
    options: dict[str, Any] = {}


class ScalarModel(ColumnModel):
    """A column of the row, or an expression over its columns."""

    kind: ScalarKind
    expression: str | None = None
    transforms: list[Literal["lowercase", "trim"]] = []
    default: Any = None
    variants: list[str] | None = None

    @model_validator(mode="after")
    def check_enum(self) -> ScalarModel:
        if not _is_scalar(self.default) and self.default is not None:
            raise refuse("default", "must be a plain value")
        if self.expression is not None and self.column is not None:
            raise refuse("expression", "cannot be combined with 'column'")
        if self.expression is not None and not self.expression.strip():
            raise refuse("expression", "is empty")
        if self.variants is None:
            return self
        if self.kind != "enum":
            raise refuse("variants", f"is allowed only for 'enum', not for '{self.kind}'")
        if len(set(self.variants)) != len(self.variants):
            raise refuse("variants", "has a duplicate value")
        if any(not each.strip() or "=>" in each or "\n" in each for each in self.variants):
            raise refuse("variants", "has a value that is empty or contains '=>' or a line break")
        return self


class CustomModel(ColumnModel):
    """A column of a type that no other field covers."""

    kind: Literal["custom"]
    default: Any = None
    postgres: Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1), WithJsonSchema(_ONE_OR_MORE)]
    opensearch: Annotated[str, Field(min_length=1)]


class VectorModel(ColumnModel):
    """An embedding: a column of pgvector, or an array of numbers."""

    kind: Literal["vector"]
    dimensions: Annotated[int, Field(ge=1)]


class MapModel(ColumnModel):
    """A jsonb column with arbitrary keys."""

    kind: Literal["map"]
    values: MapValues


class GeoModel(Model):
    """A point."""

    kind: Literal["geo"]
    name: FieldName
    lat: Identifier | None = None
    lon: Identifier | None = None
    column: Identifier | None = None
    required: bool = False
    options: dict[str, Any] = {}

    @model_validator(mode="after")
    def check_shape(self) -> GeoModel:
        if (self.lat is None) != (self.lon is None):
            raise refuse(
                "lat" if self.lat is None else "lon", "is missing; a point needs either 'lat' and 'lon', or 'column'"
            )
        if self.lat is not None and self.column is not None:
            raise refuse("column", "cannot be combined with 'lat' and 'lon'")
        return self


class ConstantModel(Model):
    """The same value in every document."""

    kind: Literal["constant"]
    name: FieldName
    value: Constant = None


class ObjectModel(Model):
    """Columns of the same row under one key."""

    kind: Literal["object"]
    name: FieldName
    options: dict[str, Any] = {}
    fields: list[FieldModel]


class _RelatedModel(Model):
    name: FieldName
    table: Identifier
    schema_: Identifier | None = Field(None, alias="schema")
    filters: list[FilterModel] = []
    options: dict[str, Any] = {}


class _JoinModel(_RelatedModel):
    primary_key: Identifiers
    fields: list[FieldModel]


class BelongsToModel(_JoinModel):
    """The row that a column of this one points at."""

    kind: Literal["belongs_to"]
    column: Identifiers | None = None
    required: bool = False


class HasOneModel(_JoinModel):
    """One row that points at this one."""

    kind: Literal["has_one"]
    foreign_key: Identifiers
    order_by: list[OrderModel] = []
    required: bool = False


class _ToManyModel(_JoinModel):
    order_by: list[OrderModel] = []
    limit: Annotated[int, Field(ge=1)] | None = None


class HasManyModel(_ToManyModel):
    """All rows that point at this one."""

    kind: Literal["has_many"]
    foreign_key: Identifiers


class ManyToManyModel(_ToManyModel):
    """Rows that a junction connects to this one."""

    kind: Literal["many_to_many"]
    through: ThroughModel


class AggregateModel(_RelatedModel):
    """One value computed from related rows."""

    kind: Literal["count", "sum", "avg", "min", "max", "ids"]
    foreign_key: Identifiers | None = None
    through: ThroughModel | None = None
    column: Identifier | None = None
    value_type: ScalarKind | None = None
    element_type: ScalarKind | None = None

    @model_validator(mode="after")
    def check_keys(self) -> AggregateModel:
        if (self.foreign_key is None) == (self.through is None):
            raise refuse("foreign_key", f"{self.kind} needs either 'foreign_key' or 'through', not both")
        takes = {
            "column": self.kind in ("sum", "avg", "min", "max"),
            "value_type": self.kind in ("sum", "min", "max"),
            "element_type": self.kind == "ids",
        }
        for key, wanted in takes.items():
            if wanted and getattr(self, key) is None:
                raise refuse(key, f"is missing; '{self.kind}' needs it")
            if not wanted and getattr(self, key) is not None:
                raise refuse(key, f"is not allowed for '{self.kind}'")
        return self


FieldModel = Annotated[
    ScalarModel
    | CustomModel
    | VectorModel
    | MapModel
    | GeoModel
    | ConstantModel
    | ObjectModel
    | BelongsToModel
    | HasOneModel
    | HasManyModel
    | ManyToManyModel
    | AggregateModel,
    Field(discriminator="kind"),
]


class SoftDeleteModel(Model):
    """Rows that count as deleted."""

    column: Identifier | None = None
    field: FieldName | None = None
    when: list[FilterModel] = []

    @model_validator(mode="after")
    def check_one(self) -> SoftDeleteModel:
        if (self.column is None) == (self.field is None):
            raise refuse("column", "needs either 'column' or 'field', not both")
        return self


class SpecificationModel(Model):
    """The whole file."""

    version: Literal[1]
    table: Identifier
    schema_: Identifier = Field("public", alias="schema")
    primary_key: Identifiers | None = None
    doc_id: Identifiers | None = None
    soft_delete: SoftDeleteModel | None = None
    filters: list[FilterModel] = []
    transform: str | None = None
    routing: Identifier | None = None
    settings: dict[str, Any] = {}
    source_excludes: list[str] = []
    fields: Annotated[list[FieldModel], Field(min_length=1)]

    @model_validator(mode="after")
    def check_transform(self) -> SpecificationModel:
        if self.transform is not None and not _FUNCTION.fullmatch(self.transform):
            raise refuse("transform", "must be module:function")
        return self


FIELD_MODELS: dict[str, type[Model]] = {
    **{kind.value: ScalarModel for kind in ScalarType if kind.value in get_args(ScalarKind)},
    "custom": CustomModel,
    "vector": VectorModel,
    "map": MapModel,
    "geo": GeoModel,
    "constant": ConstantModel,
    "object": ObjectModel,
    "belongs_to": BelongsToModel,
    "has_one": HasOneModel,
    "has_many": HasManyModel,
    "many_to_many": ManyToManyModel,
    **dict.fromkeys(("count", "sum", "avg", "min", "max", "ids"), AggregateModel),
}
"""The model of each type key."""


def keys_of(model: type[BaseModel]) -> list[str]:
    """Return the keys that a file may have in the place of a model; for fields without the type key."""
    names = [info.alias or name for name, info in model.model_fields.items()]
    return [name for name in names if name not in ("kind", "name")]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of specifications.

    It is derived from the models, so the two cannot diverge. Models have fields as `{kind, name, …}`; files have
    `{keyword: email, …}`, so each kind becomes an object whose type key is required.
    """
    schema = SpecificationModel.model_json_schema(by_alias=True)
    definitions: dict[str, Any] = schema.pop("$defs")
    fields = {kind: _written(kind, definitions[model.__name__]) for kind, model in FIELD_MODELS.items()}
    others = {name: each for name, each in definitions.items() if "kind" not in each["properties"]}
    definitions = {**others, **fields, _FIELD: {"oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in fields]}}
    return {"$schema": _DIALECT, **_plain(schema), "$defs": {name: _plain(each) for name, each in definitions.items()}}


def _written(kind: str, model: dict[str, Any]) -> dict[str, Any]:
    """Return a field as it is written: its type key with the name, then the rest."""
    properties = dict(model["properties"])
    del properties["kind"]
    name = {**properties.pop("name"), "description": "The field's name in the document."}
    required = [each for each in model.get("required", []) if each not in ("kind", "name")]
    return {**model, "properties": {kind: name, **properties}, "required": [kind, *required]}


def _plain(value: Any) -> Any:
    """Point references to fields at the union of all kinds, and remove titles that repeat the key."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "discriminator" in value:
        return {"$ref": f"#/$defs/{_FIELD}"}
    return {key: _plain(each) for key, each in value.items() if not (key == "title" and isinstance(each, str))}
