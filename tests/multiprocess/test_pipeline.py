"""A pipeline over several processes has the same results as in one process."""

import json
import re

import numpy as np
import pytest

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.recipe.program import train_program
from flax_mesh.recipe.resolve import resolve
from flax_mesh.recipe.target import local_target
from flax_mesh.train.warm_start import find_start, start_from
from tests.multiprocess.cases import make_pipeline, parse_sizes, results
from tests.multiprocess.processes import assert_all_done, run_workers
from tests.train.support.llama import LLAMA, config_of

# model, schedule, mesh, processes, devices of each, steps
MATRIX = [
    ("small", "1f1b", "pp:2", 2, 1, 2),
    ("net", "1f1b", "pp:2,fsdp:2", 2, 2, 20),
    ("net", "1f1b", "pp:4", 4, 1, 20),
    ("net", "interleaved-1f1b", "pp:2", 2, 1, 20),
    ("net", "zb-h2", "pp:4", 4, 1, 20),
    ("net", "v-min", "pp:2,fsdp:2", 2, 2, 20),
    ("net", "zb-h1", "pp:2,fsdp:2", 2, 2, 20),
    ("decoder", "interleaved-1f1b", "pp:2,tp:2", 2, 2, 20),
    ("net", "1f1b", "pp:4", 2, 2, 20),  # two groups in each process
    ("net", "zb-h1", "pp:2,fsdp:2", 4, 1, 20),  # two processes share a group
    ("decoder", "1f1b", "pp:2,fsdp:2,tp:2", 4, 2, 20),  # the same with two devices each
    ("long", "1f1b", "pp:2,sp:2", 4, 1, 3),  # queries are split over the processes of a group
]


@pytest.mark.sampled
@pytest.mark.parametrize(("model", "schedule", "sizes", "processes", "devices", "steps"), MATRIX)
def test_several_processes_have_the_results_of_one(model, schedule, sizes, processes, devices, steps, tmp_path):
    arguments = (model, schedule, sizes, str(tmp_path), str(steps))
    assert_all_done(run_workers("train", processes, devices, *arguments), "train is done")
    reports = [json.loads((tmp_path / f"report{process}.json").read_text()) for process in range(processes)]
    found: dict[str, np.ndarray] = {}  # "leaf/device" -> shard; each device belongs to one process
    for process, report in enumerate(reports):  # every process has all metrics, equal bit for bit
        assert (report["rows"], report["sums"]) == (reports[0]["rows"], reports[0]["sums"])
        own = dict(np.load(tmp_path / f"shards{process}.npz"))
        assert own and not own.keys() & found.keys()
        found |= own
    pipeline = make_pipeline(model, schedule, parse_sizes(sizes))
    rows, sums, shards = results(pipeline, model, steps)
    assert len(rows) == steps and rows[0]["loss"] != rows[-1]["loss"]
    of_several, of_one = ([row["loss"] for row in some] for some in (reports[0]["rows"], rows))
    np.testing.assert_allclose(of_several, of_one, rtol=1e-6)
    assert reports[0]["rows"][0].keys() == rows[0].keys()
    assert reports[0]["sums"] == pytest.approx(sums, rel=1e-6)
    assert found.keys() == shards.keys()
    for name, value in shards.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5 * np.abs(value).max(initial=0))
    # Every stage is compiled in exactly the processes that have devices of its group, in JAX's order of the devices.
    per_group = pipeline.mesh.jax_mesh.size // pipeline.mesh.mpmd_dim
    for process, report in enumerate(reports):
        groups = {place // per_group for place in range(process * devices, (process + 1) * devices)}
        assert report["compiled"] == [stage for stage, group in enumerate(pipeline.group_of) if group in groups]


@pytest.mark.slow
def test_a_different_shape_is_rejected_before_the_transfer():
    ended = run_workers("mismatch", 2, 1)
    assert [one.code for one in ended] == [0, 0], [one.output for one in ended]
    shapes = [re.findall(r'"shape": \[(\d+), 3, 8\]', one.output) for one in ended]
    assert shapes == [["4", "2"], ["2", "4"]]  # sent by group 1 and expected by group 0, and vice versa


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
    program = train_program(resolve(config, local_target(config.mesh, config.run.platform)))
    rules = program.rules
    state, _ = start_from(find_start(str(LLAMA)), program.init(), rules.layers)
    with Checkpointer(tmp_path, layers=rules.layers) as checkpointer:
        checkpointer.save(7, state.to_nnx(), {})
    ended = run_workers("starts", 2, 2, str(tmp_path))
    assert_all_done(ended, "starts is done")
    for one in ended:
        assert len(re.findall(r"shards are new; step 7, restored \d+ arrays, 0 unchanged", one.output)) == 2, one.output
        assert len(re.findall(r"shards are new; restored all \d+ arrays of the model", one.output)) == 2, one.output


# model, schedule, mesh, processes, devices of each
ORDERED = [
    ("net", "1f1b", "pp:2", 2, 1),
    ("decoder", "1f1b", "pp:4", 4, 1),
    ("net", "zb-v", "pp:2", 2, 1),
    ("net", "zb-h1", "pp:4", 4, 1),
    ("decoder", "zb-h1", "pp:2,fsdp:2", 2, 2),
    ("net", "1f1b", "pp:4,fsdp:2", 4, 2),
    ("net", "gpipe", "pp:4", 2, 2),  # two groups in each process
    ("net", "zb-h1", "pp:2,fsdp:2", 4, 1),  # two processes share a group
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "schedule", "sizes", "processes", "devices"), ORDERED)
def test_calls_matched_by_number_equal_the_transfer_server_bit_for_bit(model, schedule, sizes, processes, devices):
    """On CPU `jax.device_put` cannot transfer between processes: `tests.multiprocess.counted` takes its place."""
    ended = run_workers("ordered", processes, devices, model, schedule, sizes, "4")
    assert_all_done(ended, "ordered is done")
    for one in ended:
        assert 'forced: transport="ordered" is not supported by every process' in one.output, one.output
        for process in range(processes):
            line = f"process {process}: the cpu client does not support transfers between processes"
            assert line in one.output, one.output
        failed = r"test of jax.device_put from group \d \(process(es)? .*\) to group \d \(.*\) failed: "
        for reason in (r"received \[\d+(, \d+)*\], expected \[\d+(, \d+)*\]\n", "timed out\n"):
            assert re.search(failed + reason, one.output), one.output
        assert 'Use transport="server" (in a recipe pipeline.transport=server).' in one.output, one.output
    assert len({re.search(r"\d+ transfers a step", one.output)[0] for one in ended}) == 1  # pyright: ignore
