"""The cache of compiled programs in the run folder: used by a resumed run, without effect on its losses."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.bigram import write_text

RECIPE = Path(__file__).parents[1] / "train" / "bigram.py"
# As a user's process: without the cache that the tests share. Small programs are cached too.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
ENVIRONMENT |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0"}
ENVIRONMENT |= {"JAX_LOG_COMPILES": "1"}


def run(folder, *settings):
    """(exit code, output, losses) of a run of four steps."""
    more = [f"data.source={folder.parent / 'squares.txt'}", f"run.folder={folder}", "run.platform=cpu:2"]
    command = [sys.executable, "-m", "flax_mesh.cli", "train", str(RECIPE), *more, "checkpoint.every=2", *settings]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return done.returncode, done.stdout + done.stderr, [row["loss"] for row in rows]


def hits(output):
    return output.count("Persistent compilation cache hit for 'jit_step'")


@pytest.mark.slow
def test_runs_that_read_the_programs_compile_damaged_ones_or_have_no_cache_have_the_same_losses(tmp_path):
    write_text(tmp_path)
    code, output, losses = run(tmp_path / "run", "run.steps=4")
    assert code == 0 and not hits(output) and len(losses) == 4
    assert any("jit_step" in file.name for file in (tmp_path / "run" / "compiled").iterdir())
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    for name in ("copy", "damaged"):
        copy = Path(shutil.copytree(tmp_path / "run", tmp_path / name))
        for file in (copy / "compiled").iterdir():
            if name == "damaged":
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        code, output, again = run(copy, "run.steps=4", "--allow-changes")
        assert code == 0 and hits(output) == (name == "copy") and again == losses
    code, _, again = run(tmp_path / "none", "run.steps=4", "run.compilation_cache=false")
    assert code == 0 and not (tmp_path / "none" / "compiled").exists() and again == losses
