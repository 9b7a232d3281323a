"""The program `penstock`, also as `python -m penstock`."""

import os

# No command does linear algebra. Threads for it, which numpy starts when it is imported, are a tenth of a short
# command's time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from penstock.cli.main import main

if __name__ == "__main__":
    main()
