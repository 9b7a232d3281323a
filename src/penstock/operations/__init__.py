"""What can be done with a pipeline and what can be known of it, as functions of its config: `api` and `cli` call these.

`running` starts a pipeline; `status`, `plan` and `report` look at one; `commands`, `teardown` and `verify` act on one.
Nothing here prints or parses options.
"""
