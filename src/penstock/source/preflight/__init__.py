"""Is this server ready to be a source? Checks as data, each with what was found and what to do about it."""

from penstock.source.preflight.report import Check, Report, Severity, Status
from penstock.source.preflight.run import Request, run_preflight

__all__ = ["Check", "Report", "Request", "Severity", "Status", "run_preflight"]
