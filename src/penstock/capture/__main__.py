"""`python -m penstock.capture`: the child process; started by `CaptureProcess`, not by people."""

import sys

from penstock.capture.process import run_child

if __name__ == "__main__":
    sys.exit(run_child())
