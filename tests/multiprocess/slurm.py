"""The job of docs/multiprocess.md under Slurm on this machine, by hand: `python -m tests.multiprocess.slurm PREFIX`

PREFIX is where the packages slurmctld, slurmd, slurm-client, slurm-wlm-basic-plugins and libhwloc15 of Debian 12 are
unpacked (`dpkg -x`), so that none of them is installed. Slurm listens at 127.0.0.1 only, JAX at all addresses. The job
is stopped by the signal of its time limit and queued again. It and a short run by `srun -n 2` must have the rows and
parameters of `flax-mesh launch -n 2`.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.multiprocess.launches import SETTINGS, assert_same_run, run, train
from tests.multiprocess.processes import ROOT, free_port

DIRECT = ("mesh.shape=fsdp:4,tp:2", "run.steps=3", "checkpoint.every=3")
STEPS = 150
LIMIT_S = 900
CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=pmi2
ReturnToService=2
PluginDir={lib}/slurm-wlm
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
NodeName=localhost NodeAddr=127.0.0.1 CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""
# A second per step, so that the signal comes before the last one.
RECIPE = """
import time
from dataclasses import replace
from flax_mesh.train import load_recipe

def recipe():
    slow = lambda folder, config, start: lambda row: time.sleep(1)
    return replace(load_recipe("{tiny}"), hooks=(slow,))
"""


def job_of(page: str, command: list[str]) -> str:
    """The script of the docs, for two processes on this machine and four minutes, with another command."""
    (script,) = [block for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "scontrol" in block]
    script = re.sub(r"#SBATCH --nodes=.*", "#SBATCH --nodes=1 --ntasks-per-node=2 --time=4:00", script)
    script = script.replace("USR1@300", "USR1@60")
    return re.sub(r"flax-mesh train .*", " ".join(command), script)


def main(prefix: Path, folder: Path) -> None:
    lib = prefix / "usr" / "lib" / "x86_64-linux-gnu"
    (folder / "slurm.conf").write_text(CONF.format(controller=free_port(), node=free_port(), lib=lib, folder=folder))
    variables = {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "LD_LIBRARY_PATH": f"{lib}:{lib}/slurm-wlm",
        "PATH": f"{prefix}/usr/bin:{prefix}/usr/sbin:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    environment = os.environ | variables

    def output(*command: str, where: Path = folder) -> str:
        return subprocess.run(command, env=environment, cwd=where, check=True, text=True, capture_output=True).stdout

    (folder / "state").mkdir()
    (folder / "recipe.py").write_text(RECIPE.format(tiny=ROOT / "recipes" / "tiny.py"))
    settings = ["mesh.shape=pp:2,fsdp:4", f"run.steps={STEPS}", "checkpoint.every=10"]
    recipe = (str(folder / "recipe.py"), *SETTINGS[1:])
    command = [sys.executable, "-m", "flax_mesh.cli", "train", *recipe, *settings, f"run.folder={folder}/slurm"]
    (folder / "job.sh").write_text(job_of((ROOT / "docs" / "multiprocess.md").read_text(), command))
    daemons = [
        ["slurmctld-wlm", "-D"],
        ["slurmd-wlm", "-D", "-N", "localhost", "-d", f"{prefix}/usr/sbin/slurmstepd-wlm"],
    ]
    with (folder / "daemons.log").open("w") as log:
        started = [subprocess.Popen(daemon, env=environment, stdout=log, stderr=log) for daemon in daemons]
        try:
            time.sleep(5)
            program = (sys.executable, "-m", "flax_mesh.cli")
            print(output("sinfo"), output("srun", "-n", "2", *program, *train(folder / "srun", *DIRECT), where=ROOT))
            print(output("sbatch", "-o", "job.log", "job.sh"), flush=True)
            end, state = time.monotonic() + LIMIT_S, ""
            while time.monotonic() < end and (now := output("squeue", "-h", "-o", "%i %T %M %r")):
                if now.split()[:2] != state.split()[:2]:
                    print(time.strftime("%T"), now.strip(), flush=True)
                    state = now
                time.sleep(2)
            print(output("scontrol", "show", "job"))
        finally:
            subprocess.run(["scancel", "--user=root"], env=environment, check=False)  # the controller may not run
            time.sleep(5)
            for daemon in reversed(started):
                daemon.terminate()
                daemon.wait(30)
            print((folder / "daemons.log").read_text()[-3000:], (folder / "job.log").read_text())
    run(2, 4, folder / "direct", *DIRECT)
    assert_same_run(folder / "srun", folder / "direct", 3)
    run(2, 4, folder / "launch", *settings, settings=recipe)
    assert_same_run(folder / "slurm", folder / "launch", STEPS)
    print(f"the 3 rows with fsdp, the {STEPS} rows with pp and the parameters are those of flax-mesh launch -n 2")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(sys.argv[1]), Path(name))
