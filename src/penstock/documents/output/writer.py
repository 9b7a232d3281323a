"""Keys to documents in the sink, in waves: what is in memory at the same time does not grow with their number.

A wave is one job, whatever the number of indexes. Few documents are built without one, in this process: a Spark job
costs more than they do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from penstock import failpoints
from penstock.destinations.base import Tasks
from penstock.documents.base import Rejection
from penstock.documents.output.generations import Generations
from penstock.documents.output.settings import DocumentsSettings
from penstock.documents.output.tasks import BuildJob, Outcome
from penstock.documents.resolve import ResolvedKeys
from penstock.workers.process_tasks import ProcessTasks


@dataclass(slots=True)
class Written:
    """What was written for a batch, or for a part of one."""

    documents: Counter[str] = field(default_factory=Counter[str])
    """By index."""
    rejections: list[Rejection] = field(default_factory=list[Rejection])

    def add(self, outcomes: Iterable[Outcome]) -> None:
        for each in outcomes:
            self.documents[each.index] += each.documents
            self.rejections += each.rejections


class DocumentWriter:
    """Runs the jobs of one thread."""

    def __init__(
        self,
        settings: DocumentsSettings,
        tasks: Tasks,
        job: Callable[[], BuildJob],
        generations: Generations,
        on_written: Callable[[Sequence[Outcome]], None],
    ) -> None:
        """`job` is asked anew for each wave: which generations there are changes. `on_written` hears of each wave."""
        self._settings = settings
        self._tasks = tasks
        self._here = ProcessTasks()
        self._job = job
        self._generations = generations
        self._on_written = on_written

    def write(self, keys: Iterable[ResolvedKeys]) -> Written:
        """Build and write all of them."""
        written = Written()
        for wave in self._waves(keys):
            few = sum(map(len, wave)) <= self._settings.local_documents
            tasks = self._here if few else self._tasks
            # Nobody begins or ends a generation while documents are on their way to those that there are.
            with self._generations.writing():
                outcomes = tasks.run(wave, self._job(), description=_description(wave))
                self._on_written(outcomes)
            written.add(outcomes)
        return written

    def _waves(self, keys: Iterable[ResolvedKeys]) -> Iterator[list[ResolvedKeys]]:
        source = iter(keys)
        if failpoints.is_off("bounded_fan_out"):
            yield from _as_one(source)
            return
        while wave := list(islice(source, self._settings.wave_chunks)):
            yield wave


def _description(wave: Sequence[ResolvedKeys]) -> str:
    indexes = sorted({each.index for each in wave})
    return f"build {sum(map(len, wave))} documents of {', '.join(indexes)}"


def _as_one(keys: Iterator[ResolvedKeys]) -> Iterator[list[ResolvedKeys]]:
    """All keys of an index in one piece: what must not be done."""
    together: dict[str, list[list[str]]] = {}
    for each in keys:
        columns = together.setdefault(each.index, [[] for _ in each.keys])
        for column, values in zip(columns, each.keys, strict=True):
            column += values
    for index, columns in together.items():
        yield [ResolvedKeys(index, tuple(columns))]
