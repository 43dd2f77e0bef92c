"""Published training runs: the figures of the table, and predicted step times beside the published ones."""

from dataclasses import replace
from statistics import median

import pytest

from flax_mesh.plan import plan
from flax_mesh.plan.advice import ERRORS
from flax_mesh.plan.topology import parse_topology
from flax_mesh.train import load_recipe
from tests.plan.published import MINIMAL, RUNS, SMALL, fitted, held_out, num_parameters, of_chips, of_experts

BY_ID = {run.id: run for run in RUNS}
# Of relative errors: the bar of dense runs, the share of them that meets it, the median, and the largest one.
LIMIT, SHARE, MEDIAN, OUTLIER = 0.12, 0.85, 0.06, 0.27
EXPERTS, OUTSIDE = 0.25, {"7-OSS-64"}  # the bar of runs with experts, and those that do not meet it
PARAMETERS = {"6-8B-8": 8.03e9, "6-70B-256": 70.55e9, "6-405B-2x256": 405.8e9, "4-22B-01": 22.1e9, "5e-16B-01": 16.4e9}
PARAMETERS |= {"5e-64B-01": 65.1e9, "5p-32B-01": 32.9e9, "5p-128B-01": 129.5e9, "5p-512B-01": 516.7e9}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_shapes_have_the_published_number_of_parameters(name):
    assert num_parameters(BY_ID[name].model) == pytest.approx(PARAMETERS[name], rel=0.005)


def test_half_of_the_runs_of_a_chip_are_held_out_unless_they_are_few():
    assert {run.id for run in fitted()} | {run.id for run in held_out()} == {run.id for run in RUNS if not run.no_bar}
    assert not {run.id for run in fitted()} & {run.id for run in held_out()}
    some, others = ({run.id for run in runs} for runs in of_experts())
    assert not some & others and 0 <= len(others) - len(some) <= 1
    counts = {name: (len(runs), len({*runs} & {*held_out()})) for name, runs in of_chips().items()}
    assert all(held == ((count + 1) // 2 if count >= SMALL else 0) for count, held in counts.values()), counts


def test_without_the_fitted_constants_step_times_are_not_predicted():
    run = BY_ID["6-8B-32"]
    topology = parse_topology(run.topology)
    ideal = replace(topology, chip=replace(topology.chip, matmul_fraction=1.0))
    assert plan(run.config(), ideal).time.seconds / run.seconds - 1 < -2 * LIMIT


@pytest.mark.slow
def test_most_published_step_times_that_were_not_fitted_are_predicted():
    errors = {run.id: plan(run.config(), run.topology).time.seconds / run.seconds - 1 for run in held_out()}
    within = [name for name, value in errors.items() if abs(value) <= LIMIT]
    assert len(within) >= SHARE * len(errors), errors
    assert median(map(abs, errors.values())) <= MEDIAN and max(map(abs, errors.values())) <= OUTLIER, errors


@pytest.mark.slow
def test_step_times_of_experts_that_were_not_fitted_are_predicted():
    errors = {run.id: plan(run.config(), run.topology).time.seconds / run.seconds - 1 for run in of_experts()[1]}
    assert {name for name, value in errors.items() if abs(value) > EXPERTS} == OUTSIDE, errors


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["", "windows", "experts"])
def test_the_errors_of_runs_that_were_not_fitted_are_in_the_range_that_a_plan_states(reason):
    runs = {"": held_out(), "experts": of_experts()[1]}.get(reason, [run for run in RUNS if run.no_bar == reason])
    for run in runs:
        found = plan(run.config(), run.topology)
        several = found.topology.num_slices > 1
        kind = reason if reason == "experts" else "several TPU slices" if several else "dense models on one TPU slice"
        low, high, _ = ERRORS[kind]
        assert low - 0.005 <= found.time.seconds / run.seconds - 1 <= high + 0.005, run.id


# Recipe, chip, whether XLA may keep excess precision (its default; the recipes forbid it): seconds of a step and GiB at
# its peak, by `python -m tests.benchmarks gpu`.
MEASURED = {
    ("recipes/llama_1b.py", "h200", True): (0.4447, 61.2),
    ("recipes/llama_1b.py", "h200", False): (0.4360, 55.7),
    ("recipes/llama_1b.py", "h100", False): (0.4490, 55.6),
    ("recipes/llama_1b.py:llama_3_2_1b", "h200", True): (0.5320, 61.4),
}


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "chip", "excess_precision"), MEASURED)
def test_the_steps_of_unrolled_layers_that_were_measured_on_a_gpu_are_predicted(recipe, chip, excess_precision):
    config = load_recipe(recipe)
    options = config.run.compiler_options.replace("false", "true") if excess_precision else config.run.compiler_options
    found = plan(replace(config, run=replace(config.run, compiler_options=options)), f"{chip}:1x1")
    measured = MEASURED[recipe, chip, excess_precision]
    assert (found.time.seconds, found.memory.peak / 2**30) == pytest.approx(measured, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("run", [run for run in RUNS if run.remat == MINIMAL or run.id[:2] in ("4-", "5e")])
def test_runs_that_offload_nothing_fit(run):
    """They sum the gradient of the embedding in bfloat16, flax_mesh in float32: twice the bytes of a whole one."""
    memory = plan(run.config(), run.topology).memory
    assert memory.peak - 2 * run.model.vocab_size * run.model.hidden_size <= memory.capacity


@pytest.mark.slow
def test_dp_over_slices_uses_the_network_between_them():
    one, two = (plan(BY_ID[name].config(), BY_ID[name].topology) for name in ("5e-16B-01", "5e-16B-02"))
    assert sum(x.dcn_bytes for x in one.traffic) == 0
    gradients = 2 * num_parameters(BY_ID["5e-16B-01"].model) / 256  # bfloat16, an all-reduce over 2 slices
    assert sum(x.dcn_bytes for x in two.traffic if x.axes == ("dp",)) == pytest.approx(gradients, rel=0.05)
    assert two.time.seconds >= one.time.seconds
