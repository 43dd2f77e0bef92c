"""Runs of two workers of Ray, one of which is killed: `python -m tests.multiprocess.ray_job FOLDER SEED MESH ...`

Ray listens at 127.0.0.1 only, and so does JAX in its workers. FOLDER/SEED-MESH is the run folder.
"""

import os
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from flax_mesh.train import TrainConfig, apply_overrides, load_recipe
from flax_mesh.train.ray import ray_trainer
from tests.multiprocess.launches import SETTINGS
from tests.multiprocess.processes import ROOT

STEPS, EVERY = 20, 4
OPTIONS = (f"run.steps={STEPS}", f"checkpoint.every={EVERY}")
# Imported by Python when a worker starts. Ray calls `initialize` without an address to listen at.
LOCAL_JAX = """
import jax
initialize = jax.distributed.initialize
jax.distributed.initialize = lambda address, *more: initialize(address, *more, coordinator_bind_address=address)
"""
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the address of the machine is 127.0.0.1
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_worker_niceness": "0",
}


def config_of(folder: Path, mesh: str, driver: int) -> Callable[[], TrainConfig]:
    """A `make_config` whose workers leave their pids in `folder`, so that they can be killed."""

    def make_config() -> TrainConfig:
        if os.getpid() != driver:
            (folder / f"{os.getpid()}.pid").touch()
        recipe, *settings = SETTINGS
        settings += [f"mesh.shape={mesh}", f"run.folder={folder}/run", *OPTIONS]
        return apply_overrides(load_recipe(str(ROOT / recipe)), settings)

    return make_config


def pids(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("*.pid"))


def kill_one(folder: Path, seed: str) -> None:
    """Kills one of the two workers after a random step."""
    choose, metrics = random.Random(seed), folder / "run" / "metrics.jsonl"
    step, index, wait = choose.randint(1, STEPS - 5), choose.randint(0, 1), choose.random() / 5
    while not metrics.is_file() or metrics.read_text().count("\n") < step:
        time.sleep(0.01)
    time.sleep(wait)
    pid = pids(folder)[index]
    os.kill(pid, signal.SIGKILL)
    print(f"killed {pid} {wait:.2f} s after step {step}", flush=True)


def main(folder: Path, seed: str, *meshes: str) -> None:
    os.environ.update(VARIABLES, RAY_AUTH_TOKEN=secrets.token_hex())  # before Ray is imported, which reads them
    import ray  # pyright: ignore[reportMissingImports]
    from ray.train import FailureConfig, RunConfig  # pyright: ignore[reportMissingImports]

    (folder / "sitecustomize.py").write_text(LOCAL_JAX)
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:  # the paths of sockets are
        options = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 2**27}
        ray.init(_node_ip_address="127.0.0.1", num_cpus=2, _temp_dir=short, **options)
        try:
            for mesh in meshes:
                own = folder / f"{seed}-{mesh}"
                own.mkdir()
                trainer = ray_trainer(
                    config_of(own, mesh, os.getpid()),
                    2,
                    {"CPU": 1},
                    report_every=1,
                    run_config=RunConfig(
                        name="result",
                        storage_path=str(own),
                        failure_config=FailureConfig(max_failures=1),
                        worker_runtime_env={"env_vars": {"PYTHONPATH": f"{folder}:{ROOT}"}},
                    ),
                )
                threading.Thread(target=kill_one, args=[own, f"{seed}-{mesh}"], daemon=True).start()
                result = trainer.fit()
                steps = [row["step"] for _, row in result.best_checkpoints or ()]
                pointer = Path(result.checkpoint.path, "flax_mesh.json").read_text()
                print(mesh, result.return_value.status, result.metrics["step"], steps, pointer, flush=True)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
