"""What a program or a command can do with a pipeline, as functions of its config; `api` and `cli` call these.

`running` starts a pipeline; `status`, `plan` and `report` inspect one; `commands`, `teardown` and `verify` act on one.
Nothing here prints or parses options.
"""
