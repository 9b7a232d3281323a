"""`penstock check`: whether a server is ready to be a source, and what to do if not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.display import echo, make_table, wide_console
from penstock.cli.options import AsJson, OptionalConfigPath, Publication, Slot, Tables, Url, chosen_source
from penstock.config.units import count_of
from penstock.operations.readiness import check_here, source_request
from penstock.source.preflight import Check, Report, Request, Severity, Status, run_preflight

_WIDE = 120
_STYLES = {Severity.CRITICAL: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}


def check(
    context: typer.Context,
    url: Url = None,
    config_path: OptionalConfigPath = None,
    publication: Publication = None,
    slot: Slot = None,
    tables: Tables = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Pattern of tables to exclude. Can be repeated.", metavar="PATTERN")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check whether a server is ready to be a source, and say what to do about each finding.

    Changes nothing. With a config file, checks the publication, slot and tables of that pipeline; with --url and
    without --publication, the tables that could be published. The exit status is 1 if a finding is critical, else 0.

    Examples:

        penstock check
        penstock check --url postgresql://me@db.example/shop --table 'sales.*'
    """
    with chosen_source(context, url, config_path) as source:
        known = Request() if source.config is None else source_request(source.config)
        request = replace(
            known,
            publication=publication or known.publication,
            slot=slot or known.slot,
            patterns=tuple(tables or ()) or known.patterns,
            exclude=tuple(exclude or ()) or known.exclude,
            # A publication named on the command line must exist.
            manage_publication=known.manage_publication and publication is None,
        )
        report = run_preflight(source.settings, request)
        if source.config is not None:
            report = replace(report, checks=(*report.checks, *check_here(source.config)))
    if as_json:
        echo(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
    else:
        print_report(report)
    if not report.ready:
        raise typer.Exit(1)


def findings_table(findings: Iterable[Check], width: int) -> Table:
    """The findings as a table; where it is narrow, each remedy is below its finding."""
    is_wide = width >= _WIDE
    titles = ("what", "remedy") if is_wide else ("what, and the remedy",)
    table = make_table("severity", "check", *titles, unbroken=("severity", "check"))
    for finding in findings:
        texts = [finding.what, finding.remedy]
        if not is_wide:
            texts = ["\n".join(filter(None, [finding.what, finding.remedy and f"→ {finding.remedy}"]))]
        table.add_row(_label(finding), Text(finding.id), *map(Text, texts))
    return table


def print_report(report: Report) -> None:
    """Print the findings and a summary, for people."""
    console = wide_console()
    # The most serious last, next to the summary, where a terminal shows them.
    console.print(findings_table(sorted(report.checks, key=_weight), console.width))
    console.print()
    console.print(_summary(report))


def _weight(finding: Check) -> int:
    if finding.status is Status.PASSED:
        return 0
    return {Severity.INFO: 1, Severity.WARNING: 2, Severity.CRITICAL: 3}[finding.severity]


def _label(finding: Check) -> Text:
    if finding.status is Status.PASSED:
        return Text("ok", style="green")
    if finding.status is Status.UNKNOWN:
        return Text("unknown", style="yellow")
    return Text(finding.severity.value, style=_STYLES[finding.severity])


def _count(number: int, severity: Severity) -> str:
    return count_of(number, "warning") if severity is Severity.WARNING else f"{number} {severity.value}"


def _summary(report: Report) -> Text:
    count = dict.fromkeys(Severity, 0)
    for finding in report.failed:
        count[finding.severity] += 1
    found = ", ".join(_count(number, severity) for severity, number in count.items() if number) or "no findings"
    if report.ready:
        return Text(f"{report.location} is ready ({found})", style="green")
    names = ", ".join(dict.fromkeys(finding.id for finding in report.critical))
    return Text(f"{report.location} is not ready ({found}): {names}", style="bold red")
