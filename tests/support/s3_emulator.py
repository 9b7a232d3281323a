"""The process of `tests.support.s3.S3Emulator`: moto, one request at a time.

moto looks whether an object is there and then writes it, and another request may come in between: of two conditional
puts both could succeed, which no store may do.

    python -m tests.support.s3_emulator <port>
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def one_at_a_time(application: Application) -> Application:
    """The same application, whose requests wait for each other."""
    turn = threading.Lock()

    def serve(environment: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with turn:
            return list(application(environment, start_response))

    return serve


def main() -> None:
    application: Any = DomainDispatcherApplication(create_backend_app)
    run_simple(
        "127.0.0.1",
        int(sys.argv[1]),
        one_at_a_time(application),
        threaded=True,
        request_handler=MotoRequestHandler,
    )


if __name__ == "__main__":
    main()
