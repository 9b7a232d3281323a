"""`transform` of a table: a `select` over its rows, in Spark SQL.

It chooses and computes the columns that the destination gets; Penstock adds its own. It must work row by row, so that a
copy and changes lead to the same rows. Spark's analyzed plan shows that: one projection directly over `changes`, of
deterministic expressions without subqueries. Aggregates, windows, generators, filters, joins and limits are other
nodes of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.errors import PySparkException

from penstock.changes.segment import OLD, RESERVED, UNCHANGED, UNREPRESENTABLE, field_names
from penstock.changes.transform import TRANSFORM
from penstock.destinations.spark.frames import BATCH, HASH, LONG, MIXED, hidden_name, key_names, literal, quote
from penstock.errors import ConfigError
from penstock.schema import TableSchema, fold_case
from penstock.spark.session import reason_of

VIEW = "changes"

_CONTROL, _OMITTED = f"penstock{LONG}", f"omitted{LONG}"
_HINT = (
    f"Write one `select … from {VIEW}` that keeps the columns of the key and computes others row by row; `where` in "
    "the same section filters rows."
)


@dataclass(frozen=True, slots=True)
class Output:
    """A column that a transform returns."""

    name: str
    inputs: tuple[str, ...]
    """The table's columns from which it is computed."""
    type: str
    plain: bool = False
    """It is one of them, unchanged."""


@dataclass(frozen=True, slots=True)
class Projection:
    """What the destination gets of a table's columns; without a `transform`, all of them."""

    outputs: tuple[Output, ...]
    text: str | None = None
    """What the transform selects; None if there is none."""

    @property
    def names(self) -> list[str]:
        return [output.name for output in self.outputs]

    def apply(self, session: Any, frame: Any, control: Sequence[str], key: Sequence[str], *, strict: bool) -> Any:
        """Return the outputs, and the columns `control` of the frame, which the statement does not see.

        `_unchanged` then names outputs. A column that is computed from omitted values and others has no known value:
        with `strict` that is an error, otherwise it counts as omitted. What `_old` and `_unrepresentable` say of other
        columns than the outputs is left out: it might be what the transform hides.
        """
        if self.text is None:
            return frame.selectExpr(*map(quote, (*control, *self.names)))
        hidden = {name: self._control(frame, name, key) for name in control}
        if UNCHANGED in control:
            hidden[_OMITTED] = UNCHANGED
        packed = ", ".join(f"{expression} as {quote(name)}" for name, expression in hidden.items())
        data = [name for name in frame.columns if name not in control]
        frame.selectExpr(*map(quote, data), f"struct({packed}) as {_CONTROL}").createOrReplaceTempView(VIEW)
        result = session.sql(f"select {self.text}, {_CONTROL} from {VIEW}")
        places = [number for number, name in enumerate(result.columns) if name != _CONTROL]
        result = result.toDF(*(f"c{number}" for number in range(len(result.columns))))
        last = f"c{len(result.columns) - 1}"
        omitted = f"{last}.{_OMITTED}" if UNCHANGED in control else None
        cells = [
            self._cell(output, f"c{place}", omitted, strict=strict)
            for output, place in zip(self.outputs, places, strict=True)
        ]
        return result.selectExpr(*(f"{last}.{quote(name)} as {quote(name)}" for name in control), *cells)

    def _control(self, frame: Any, name: str, key: Sequence[str]) -> str:
        plain = [output.name for output in self.outputs if output.plain]
        if name == UNCHANGED:
            shown = ", ".join(
                f"if(arrays_overlap({UNCHANGED}, {_texts(output.inputs)}), {literal(output.name)}, null)"
                for output in self.outputs
                if output.inputs
            )
            return f"if({UNCHANGED} is null, null, filter(array({shown}), name -> name is not null))"
        if name == UNREPRESENTABLE:
            kept = _texts([*plain, *(f"{OLD}.{each}" for each in key)])
            return f"map_filter({UNREPRESENTABLE}, (name, text) -> array_contains({kept}, name))"
        if name == OLD and dict(frame.dtypes)[OLD].startswith("struct"):
            fields = {field.name for field in frame.schema[OLD].dataType.fields}
            shown = ", ".join(f"{OLD}.{quote(each)} as {quote(each)}" for each in key if each in fields)
            return f"if({OLD} is null, null, struct({shown}))" if shown else "cast(null as string)"
        return quote(name)

    def _cell(self, output: Output, cell: str, omitted: str | None, *, strict: bool) -> str:
        name = quote(output.name)
        if omitted is None or output.plain or not output.inputs:
            return f"{cell} as {name}"
        inputs = _texts(output.inputs)
        some = f"arrays_overlap({omitted}, {inputs})"
        if not strict or len(output.inputs) == 1:
            return f"if({some}, null, {cell}) as {name}"
        mixed = f"size(array_except({inputs}, {omitted})) > 0"
        error = f"cast(raise_error({literal(MIXED)}) as {output.type})"
        return f"if({some}, if({mixed}, {error}, null), {cell}) as {name}"


def _texts(names: Sequence[str]) -> str:
    return f"array({', '.join(map(literal, names))})"


def project(session: Any, schema: TableSchema, frame: Any, statement: str | None) -> Projection:
    """Return the projection of a table; `frame` has its columns. Raises `ConfigError` if the statement cannot be used.

    `session` is one in which the view `changes` may be replaced.
    """
    types = dict(frame.dtypes)
    names = field_names(schema)
    if statement is None:
        return Projection(tuple(Output(name, (name,), types[name], True) for name in names))
    place = f'[tables."{schema}"] transform'
    found = TRANSFORM.fullmatch(statement)
    if found is None:
        raise ConfigError(f"{place} is not a `select … from {VIEW}`", hint=_HINT)
    text = found["columns"]
    frame.selectExpr(*map(quote, names)).createOrReplaceTempView(VIEW)
    try:
        result = session.sql(f"select {text} from {VIEW}")
    except PySparkException as error:
        raise ConfigError(f"{place} is not accepted by Spark: {reason_of(error)}", hint=_HINT) from None
    plan = result._jdf.queryExecution().analyzed()
    child = plan.children().apply(0) if plan.children().size() == 1 else None
    if plan.nodeName() != "Project" or child is None or child.nodeName() != "SubqueryAlias":
        raise ConfigError(f"{place} does not work row by row: it has a {_refused_node(plan)}", hint=_HINT)
    has_subquery = session._jvm.org.apache.spark.sql.catalyst.expressions.SubqueryExpression.hasSubquery
    attributes = _listed(child.output())
    numbered = {each.exprId().id(): name for each, name in zip(attributes, names, strict=True)}
    outputs: list[Output] = []
    for expression, (name, type_) in zip(_listed(plan.projectList()), result.dtypes, strict=True):
        if not expression.deterministic() or has_subquery(expression):
            raise ConfigError(f"{place}: column {name!r} is not computed from its row alone", hint=_HINT)
        inputs = tuple(numbered[each.exprId().id()] for each in _listed(expression.references().toSeq()))
        is_plain = expression.nodeName() == "AttributeReference" and inputs == (name,)
        outputs.append(Output(name, inputs, type_, is_plain))
    _check_names(schema, place, outputs)
    return Projection(tuple(outputs), text)


def _check_names(schema: TableSchema, place: str, outputs: Sequence[Output]) -> None:
    names = [fold_case(output.name) for output in outputs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{place} returns columns of the same name: {', '.join(twice)}", hint=_HINT)
    taken = sorted({*names} & {*RESERVED, *(hidden_name(schema, each) for each in (HASH, BATCH))})
    if taken:
        raise ConfigError(f"{place} returns columns with names of Penstock's: {', '.join(taken)}", hint=_HINT)
    plain = {output.name for output in outputs if output.plain}
    lost = [name for name in key_names(schema) if name not in plain]
    if lost:
        raise ConfigError(f"{place} drops or changes columns of the key: {', '.join(lost)}", hint=_HINT)


def _refused_node(plan: Any) -> str:
    while plan.nodeName() in ("Project", "SubqueryAlias") and plan.children().size() == 1:
        plan = plan.children().apply(0)
    return plan.nodeName().lower()


def _listed(sequence: Any) -> list[Any]:
    return [sequence.apply(number) for number in range(sequence.size())]
