"""`penstock monitoring`: print alert rules and a dashboard for the metrics of pipelines."""

from __future__ import annotations

from importlib.resources import files

import typer

from penstock.cli.display import echo

monitoring = typer.Typer(
    name="monitoring",
    help="Print alert rules for Prometheus and a dashboard for Grafana.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@monitoring.command("alerts")
def alerts() -> None:
    """Print alert rules for Prometheus; the guide to alerts says what to do for each.

    Examples:

        penstock monitoring alerts > /etc/prometheus/rules/penstock.yml
    """
    echo(_read("alerts.yml"))


@monitoring.command("grafana")
def grafana() -> None:
    """Print a dashboard for Grafana, to be imported there.

    Examples:

        penstock monitoring grafana > penstock-dashboard.json
    """
    echo(_read("grafana.json"))


def _read(name: str) -> str:
    return files("penstock.server").joinpath("monitoring", name).read_text(encoding="utf-8").rstrip()
