"""The commands. Each module has one; `main` puts them together."""

import os

# No command does linear algebra. Threads for it, which numpy starts when it is imported, are a tenth of a short
# command's time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
