"""Runs under real launchers of MPI, which number the processes; `--coordinator` is the address of process 0."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.launches import LIMIT_S, assert_same_run, run, train
from tests.multiprocess.processes import free_port

BIN = Path(sys.executable).parent
LAUNCHERS = {
    "mpich": ["mpiexec.hydra"],
    "openmpi": ["prterun", "--personality", "ompi", "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"],
}


def under_mpi(name: str, *command: str) -> subprocess.CompletedProcess[str]:
    program, *options = LAUNCHERS[name]
    # The package of Open MPI was built for another folder.
    prefixes = dict.fromkeys(("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"), sys.prefix)
    launched = [str(BIN / program), "-n", "2", *options, sys.executable, "-m", "flax_mesh.cli", *command]
    options = {"capture_output": True, "text": True, "timeout": LIMIT_S, "errors": "replace"}
    return subprocess.run(launched, env=os.environ | prefixes, check=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("mpich", "pp:2,fsdp:4"), ("openmpi", "fsdp:4,tp:2")])
def test_a_run_under_mpi_equals_a_run_of_launch(name, mesh, tmp_path):
    if not (BIN / LAUNCHERS[name][0]).is_file():
        pytest.skip(f"needs the package {name}, whose programs are beside Python")
    options = f"mesh.shape={mesh}", "run.steps=3", "checkpoint.every=3"
    command = train(tmp_path / "mpi", *options, "run.platform=cpu:8")
    alone = under_mpi(name, *command)
    assert alone.returncode == 2 and "but JAX has one, so that each would train alone" in alone.stderr, alone
    assert not (tmp_path / "mpi").exists()
    joined = under_mpi(name, *command, f"--coordinator=127.0.0.1:{free_port()}")
    assert joined.returncode == 0, joined.stdout + joined.stderr
    run(2, 4, tmp_path / "launch", *options)
    assert_same_run(tmp_path / "mpi", tmp_path / "launch", 3)
