"""Results must not depend on the order of sets, which a hash seed decides: the same code in a fresh Python."""

import os
import subprocess
import sys
from pathlib import Path


def printed_with_another_hash_seed(code: str) -> str:
    """What `code` prints in a new process whose hash seed is not the one of this process."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"
    environment = os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
