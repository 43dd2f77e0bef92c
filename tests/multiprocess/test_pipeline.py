"""A pipeline over several processes has the same results as in one process, and as the plain step on one device."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.mpmd import Pipeline
from flax_mesh.train.build import make_mesh, run_rules, train_program
from flax_mesh.train.warm_start import find_start, start_from
from tests.mpmd.runtime.pipelines import FAST, plain
from tests.multiprocess.cases import (
    COUNT,
    MODELS,
    STEPS,
    batches,
    clipped,
    make_pipeline,
    named_shards,
    parse_sizes,
    train,
)
from tests.multiprocess.processes import assert_all_done, run_workers
from tests.train.support.llama import LLAMA, config_of

# model, schedule, mesh, processes, devices of each
LIGHT = [("net", "1f1b", "pp:2,fsdp:2", 2, 2)]
MATRIX: list[tuple[str, str, str, int, int]] = [
    ("net", "1f1b", "pp:4", 4, 1),
    ("net", "interleaved-1f1b", "pp:2", 2, 1),
    ("net", "zb-h2", "pp:4", 4, 1),
    ("net", "v-min", "pp:2,fsdp:2", 2, 2),
    ("net", "zb-h1", "pp:2,fsdp:2", 2, 2),
    ("decoder", "interleaved-1f1b", "pp:2,tp:2", 2, 2),
    ("net", "1f1b", "pp:4", 2, 2),  # two groups in each process
    ("net", "zb-h1", "pp:2,fsdp:2", 4, 1),  # two processes share a group
    ("decoder", "1f1b", "pp:2,fsdp:2,tp:2", 4, 2),  # the same with two devices each
]


def reports(folder: Path, processes: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"report{process}.json").read_text()) for process in range(processes)]


def shards(folder: Path, processes: int) -> dict[str, np.ndarray]:
    """ "leaf/device" -> shard, for all processes; each device belongs to one process."""
    found: dict[str, np.ndarray] = {}
    for process in range(processes):
        own = dict(np.load(folder / f"shards{process}.npz"))
        assert own and not own.keys() & found.keys()
        found |= own
    return found


def losses(rows: list[dict[str, float]]) -> list[float]:
    return [row["loss"] for row in rows]


def on_one_device(model: str, steps: int) -> list[dict[str, float]]:
    make, loss, _, _ = MODELS[model]
    state, step = plain(make, loss, clipped(), COUNT, compiler_options=FAST)
    rows = []
    for batch in batches(model, steps):
        state, metrics = step(state, batch)
        rows.append({name: float(value) for name, value in metrics.items()})
    return rows


def check(model: str, schedule: str, sizes: str, processes: int, devices: int, folder: Path, steps: int) -> None:
    arguments = (model, schedule, sizes, str(folder), str(steps))
    assert_all_done(run_workers("train", processes, devices, *arguments), "train is done")
    found = reports(folder, processes)
    for report in found[1:]:  # every process has all metrics, equal bit for bit
        assert report["rows"] == found[0]["rows"]
        assert report["sums"] == found[0]["sums"]
    pipeline = make_pipeline(model, schedule, parse_sizes(sizes))
    state, rows = train(pipeline, model, steps)
    assert len(rows) == steps and rows[0]["loss"] != rows[-1]["loss"]
    np.testing.assert_allclose(losses(found[0]["rows"]), losses(rows), rtol=1e-6)
    assert found[0]["rows"][0].keys() == rows[0].keys()
    np.testing.assert_allclose(losses(found[0]["rows"]), losses(on_one_device(model, steps)), rtol=1e-5)
    sums = pipeline.evaluate(state, batches(model, 1)[0])
    for name, value in sums.items():
        np.testing.assert_allclose(found[0]["sums"][name], np.asarray(value), rtol=1e-6)
    found_shards, expected = shards(folder, processes), named_shards(pipeline, state)
    assert found_shards.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found_shards[name], value, rtol=1e-5, atol=1e-5 * np.abs(value).max(initial=0))
    check_stages([set(report["compiled"]) for report in found], pipeline, processes)


def check_stages(compiled: list[set[int]], pipeline: Pipeline, processes: int) -> None:
    """Every stage is compiled in exactly the processes that have devices of its group."""
    devices = pipeline.mesh.jax_mesh.size // processes  # of one process, in JAX's order: row by row of the mesh
    per_group = pipeline.mesh.jax_mesh.size // pipeline.mesh.mpmd_dim
    for process, stages in enumerate(compiled):
        own = {place // per_group for place in range(process * devices, (process + 1) * devices)}
        assert stages == {stage for stage, group in enumerate(pipeline.group_of) if group in own}


@pytest.mark.sampled
@pytest.mark.parametrize(("model", "schedule", "sizes", "processes", "devices"), LIGHT)
def test_several_processes_have_the_results_of_one(model, schedule, sizes, processes, devices, tmp_path):
    check(model, schedule, sizes, processes, devices, tmp_path, steps=5)


@pytest.mark.slow
def test_a_different_shape_is_rejected_before_the_transfer():
    ended = run_workers("mismatch", 2, 1)
    assert [one.code for one in ended] == [0, 0], [one.output for one in ended]
    shapes = [re.findall(r'"shape": \[(\d+), 3, 8\]', one.output) for one in ended]
    assert shapes == [
        ["4", "2"],
        ["2", "4"],
    ]  # the shape that group 1 sends and the one that group 0 expects, and vice versa


@pytest.mark.slow
def test_the_code_of_the_docs_page_runs_in_two_processes():
    ended = run_workers("page", 2, 4)
    assert_all_done(ended, "page is done")
    found = [re.search(r"(\d) of 9 leaves have a shard here; loss (\S+)", one.output) for one in ended]
    first, second = [(int(match[1]), match[2]) for match in found if match]
    assert first[0] == second[0] == 5 and first[1] == second[1]  # two layers with two leaves each, and the step


@pytest.mark.slow
def test_several_processes_start_from_the_parameters_in_a_folder(tmp_path):
    config = config_of("dp:1")
    rules = run_rules(config)
    program = train_program(config, make_mesh(config, print), rules)
    state, _ = start_from(find_start(str(LLAMA)), program.init(), rules.layers)
    with Checkpointer(tmp_path, layers=rules.layers) as checkpointer:
        checkpointer.save(7, state.to_nnx(), {})
    ended = run_workers("starts", 2, 2, str(tmp_path))
    assert_all_done(ended, "starts is done")
    for one in ended:
        assert len(re.findall(r"shards are new; step 7, restored \d+ arrays, 0 unchanged", one.output)) == 2, one.output
        assert len(re.findall(r"shards are new; restored all \d+ arrays of the model", one.output)) == 2, one.output


@pytest.mark.slow
@pytest.mark.parametrize(("model", "schedule", "sizes", "processes", "devices"), MATRIX)
def test_several_processes_have_the_results_of_one_over_many_steps(
    model, schedule, sizes, processes, devices, tmp_path
):
    check(model, schedule, sizes, processes, devices, tmp_path, steps=STEPS)
