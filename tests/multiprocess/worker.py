"""One process of a test: `python -m tests.multiprocess.worker CASE PROCESS PROCESSES PORT DEVICES ARGUMENTS`."""

import faulthandler
import json
import sys
from pathlib import Path

import jax
import numpy as np

from flax_mesh.mpmd import Pipeline
from tests.multiprocess import cases
from tests.multiprocess.processes import TIME_LIMIT_S


def train(model: str, schedule: str, sizes: str, folder: str, steps: str) -> None:
    """Write the metrics of every step, the sums of an evaluation, and every shard of the state that is here."""
    pipeline = cases.make_pipeline(model, schedule, cases.parse_sizes(sizes))
    state, rows = cases.train(pipeline, model, int(steps))
    compiled = compiled_stages(pipeline)
    batch = cases.batches(model, 1)[0]
    sums = {name: float(np.asarray(value)) for name, value in pipeline.evaluate(state, batch).items()}
    shards = cases.named_shards(pipeline, state)
    here = jax.process_index()
    np.savez(Path(folder) / f"shards{here}.npz", **shards)  # pyright: ignore[reportArgumentType]
    report = {"rows": rows, "sums": sums, "transfers": pipeline.num_transfers, "compiled": compiled}
    (Path(folder) / f"report{here}.json").write_text(json.dumps(report))


def compiled_stages(pipeline: Pipeline) -> list[int]:
    """Stages of which this process has compiled anything."""
    built = [stages for stages in pipeline._built.values() if isinstance(stages, list)]
    found = {
        stage.stage
        for stages in built
        for stage in stages
        for function in (stage.forward, stage.backward, stage.weights)
        if function._cache_size()  # pyright: ignore[reportFunctionMemberAccess]
    }
    return sorted(found)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(TIME_LIMIT_S - 20, exit=True)
    case, process, processes, port, devices = sys.argv[1], *map(int, sys.argv[2:6])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        processes,
        process,
        coordinator_bind_address=f"127.0.0.1:{port}",
        cluster_detection_method="deactivate",
    )
    globals()[case](*sys.argv[6:])
    print(f"{case} is done", flush=True)
