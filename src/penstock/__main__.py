"""The program `penstock`, also as `python -m penstock`."""

import os
import signal
from types import FrameType

# No command does linear algebra. Threads for it, which numpy starts when it is imported, are a tenth of a short
# command's time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def main() -> None:
    """Import the program and run it; the entry point."""
    # Nothing needs cleanup during the imports, and an exception could be raised, or swallowed, in any extension module.
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_at_once)
    from penstock.cli.main import main as run

    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    run()


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
