"""Runs code with another hash seed: results must not depend on the order of sets."""

import os
import subprocess
import sys
from pathlib import Path


def printed_with_another_hash_seed(code: str) -> str:
    """The output of `code` in a new process with a different hash seed."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"
    environment = os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parent.parent
    result = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
