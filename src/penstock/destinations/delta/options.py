"""What a person can choose about the Delta destination, checked when the config is read."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.destinations.delta.layout import Mode
from penstock.destinations.refusals import unusable


@dataclass(frozen=True, slots=True)
class DeltaOptions:
    """See `DeltaDestination`."""

    mode: Mode = Mode.MIRROR
    deletion_vectors: bool = True
    commit_interval: float = 0.5
    maintenance: bool = True

    @classmethod
    def checked(
        cls, mode: object, deletion_vectors: object, commit_interval: object, maintenance: object
    ) -> DeltaOptions:
        """From what stands in a config; raises `ConfigError`."""
        known = [each.value for each in Mode]
        if mode not in known:
            raise unusable(f"unknown mode {mode!r}", hint=f"Use {', '.join(known[:-1])} or {known[-1]}.")
        for name, value in (("deletion_vectors", deletion_vectors), ("maintenance", maintenance)):
            if not isinstance(value, bool):
                raise unusable(f"{name} must be true or false")
        if isinstance(commit_interval, bool) or not isinstance(commit_interval, int | float) or commit_interval <= 0:
            raise unusable("commit_interval must be a number of seconds above zero", hint="The default is 0.5.")
        return cls(Mode(str(mode)), deletion_vectors is True, float(commit_interval), maintenance is True)
