"""What a command loads before it knows what it is asked for."""

from __future__ import annotations

import subprocess
import sys


def test_commands_without_spark_start_without_it():
    heavy = "('pyspark', 'deltalake', 'pandas')"
    code = f"import sys, penstock.cli.main; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
