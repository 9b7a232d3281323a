"""The HTTP server of a running pipeline: health, metrics, an API, and a page.

It runs in threads of its own and only reads. The pipeline never waits for it and survives its end. Actions go through
the state store, like the commands of the CLI. It needs the extra `web`.
"""
