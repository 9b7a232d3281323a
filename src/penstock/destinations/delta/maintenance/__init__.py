"""Keeping tables in shape while they are written: in tasks, on a schedule, without stopping anybody.

| module | |
|---|---|
| `pins` | versions that somebody reads, and files that are not committed yet: maintenance leaves both alone |
| `compaction` | small files and those with many dead rows are rewritten; deletions meanwhile are carried over |
| `cleanup` | checkpoints; commits, data, vectors and indexes that no reader needs any more |
| `schedule` | when each of them is due, for all tables |

Everything here can be stopped at any point and begun anew: what it writes is named by no commit until it is whole, and
what it deletes is needed by nobody. Only the holder of the pipeline's lease runs it, but nothing breaks if two do.
"""
