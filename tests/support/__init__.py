"""Code that tests Penstock itself: random workloads, pipelines to kill, an oracle, object stores.

Child processes and Spark's Python workers import these modules by name, so the repository goes on their path.
"""

import os
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])
_PATH = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if _ROOT not in _PATH:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, *_PATH]))
