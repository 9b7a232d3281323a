"""The indexes of a pipeline as its state has them: what `index list` and `status` show."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from penstock.config import Config, IndexChoice
from penstock.documents.mapping import fingerprint, is_built_from
from penstock.documents.quarantine import open_quarantine
from penstock.state import IndexBuild, IndexStatus, Store

STYLES = {"seeded": "green"}
"""Of a status; all others are yellow."""


@dataclass(frozen=True, slots=True)
class IndexState:
    """One index; as JSON it has the same names."""

    index: str
    table: str
    fingerprint: str
    """Of the specification as it is now."""
    status: str
    """not built, wanted, filling or seeded; outdated if the specification is another one than what was built."""
    seeded: bool
    reason: str
    """Why it is being built anew, or was."""
    generation: str | None = None
    filling: str | None = None
    documents: int | None = None
    quarantined: int = 0
    failure_policy: str = "stop"


def stored_indexes(config: Config, store: Store | None) -> list[IndexState]:
    """All indexes of the config; without a store nothing was built."""
    if store is None:
        return [_state(each, None, 0) for each in config.indexes.indexes]
    builds = store.get_index_builds()
    with closing(open_quarantine(config.state_url, config.indexes.settings.output_id)) as quarantine:
        counts = quarantine.counts()
    return [_state(each, builds.get(each.name), counts.get(each.name, 0)) for each in config.indexes.indexes]


def _state(index: IndexChoice, build: IndexBuild | None, quarantined: int) -> IndexState:
    is_current = build is not None and is_built_from(build.fingerprint, index.specification)
    status = "not built" if build is None else build.status.value
    if build is not None and not is_current:
        status = "outdated"
    return IndexState(
        index=index.name,
        table=str(index.specification.table),
        fingerprint=fingerprint(index.specification),
        status=status,
        seeded=build is not None and is_current and build.status is IndexStatus.SEEDED,
        reason="" if build is None else build.reason,
        quarantined=quarantined,
        failure_policy=index.failure_policy.value,
    )
