"""Delta tables at a cost proportional to the changes: deletion vectors and appended files.

Storage, from the bottom up; each can be read alone:

| module | |
|---|---|
| `storage` | a folder or an object store: put-if-absent, durable when it returns |
| `actions` | the actions of a log as values, and their JSON |
| `statistics` | bounds by which readers skip files |
| `vectors` | deleted rows as bitmaps |
| `schema` | types, protocols, properties; refuses unknown features |
| `files` | data files: write one with statistics, read rows, columns and keys |
| `snapshot` | a table at one version; what other commits mean for a writer (`Verdict`) |
| `checkpoint` | reading checkpoints of all kinds |
| `log` | the newest version, and taking the next one |
| `maintenance` | compaction, clean-up, pins, on a schedule |

The path of changes, in order:

| module | |
|---|---|
| `destination` | what the pipeline calls |
| `layout` | the columns of a table in the lake, by mode; its properties |
| `copy` | a table as it was at a position, written by tasks |
| `planner` | what a batch means for a table, decided on the driver |
| `tasks` | the work of a batch: compact (`penstock.changes.compaction`), then |
| `index` | the rows that it replaces, by key |
| `fill` | the values that the server omitted |
| `write` | new rows, dead rows; every change as a row |
| `table` | where tables are; one commit with its position, and what to do after a lost race |
| `reader` | a pinned version, with the names and types of the source |

How a commit is made:

    table = open_storage(path, options).child("public/orders")
    log = DeltaLog(table, "public.orders")
    snapshot = log.refresh()                             # None: no table yet
    application = Application(pipeline, "public.orders", lineage, attempt)
    boundary = snapshot.position(application)            # what the table has already
    added = write_data_file(table, fit(rows, snapshot.schema))          # in tasks
    [vector] = write_vectors(table, [vector_of(table, old).union(Vector.of(matched_rows))])
    answer = log.commit(snapshot, [
        CommitInfo(now_milliseconds(), "MERGE"),         # with an id of its own
        Txn(application.id, int(end), now_milliseconds()),
        old.removed(now_milliseconds()), old.with_vector(vector),
        added,
    ])
    match answer:
        case Committed(snapshot): ...
        case Lost(): match answer.verdict(application): ...

A new table begins with `protocol_for(schema)`, and `Metadata(id, schema_string(schema), table_configuration(…))`.
A file without live rows left is removed instead of getting a vector of all its rows.
"""
