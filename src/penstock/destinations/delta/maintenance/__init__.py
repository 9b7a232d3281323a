"""Maintenance of tables while they are written: in tasks, on a schedule, without blocking writers or readers.

| module | |
|---|---|
| `pins` | versions that are being read, and files that are not committed yet: maintenance leaves both alone |
| `compaction` | rewrites small files and files with many dead rows; carries over deletions made meanwhile |
| `cleanup` | writes checkpoints; deletes commits, data, vectors and indexes that are no longer needed |
| `schedule` | decides when each of them is due, for all tables |

All of it can be stopped at any point and started again: no commit names a file before it is complete, and only files
that nothing needs are deleted. Only the holder of the pipeline's lease runs it, but nothing breaks if two processes do.
"""
