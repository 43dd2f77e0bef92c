"""The forecast of `model.remat` against the memory of the compiled step, on CPU devices."""

import itertools
from dataclasses import replace

import pytest

from flax_mesh.cli.text.forecast import compiled_bytes
from flax_mesh.plan import Plan, plan
from flax_mesh.plan.search import search_layouts
from flax_mesh.recipe.program import build_program
from flax_mesh.train import apply_overrides, load_recipe

SETTINGS = ("model.num_layers=8", "mesh.shape=fsdp:8", "data.batch_size=16", "model.hidden_size=64")
FALLING = ("none", "full:2,none", "full:4,none", "full:6,none", "full")  # with the number of full layers


def config_of(remat: str, scan: str = "true"):
    # With splash attention the forecasts for TPUs have no scores, so that recomputation saves less.
    settings = [*SETTINGS, "model.attention=xla", f"model.remat={remat}", f"model.scan={scan}"]
    return apply_overrides(load_recipe("recipes/tiny.py"), settings)


@pytest.mark.slow
def test_forecasts_are_close_to_the_compiled_step():
    remats = (*FALLING, "attention+mlp_up", "q+k+v+attention+mlp_gate+mlp_up:4,full", "attention+mlp_up@host")
    forecasts, measured = {}, {}
    for remat in remats:
        config = config_of(remat)
        forecasts[remat], measured[remat] = plan(config).memory.peak, sum(compiled_bytes(build_program(config)) or ())
    errors = {remat: forecasts[remat] / measured[remat] - 1 for remat in remats}
    assert max(map(abs, errors.values())) < 0.12, errors
    assert sorted(FALLING, key=lambda remat: -measured[remat]) == list(FALLING)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "scan"), [("v5e:2x4", "true"), ("cpu:8", "true"), ("h100:1x8", "true"), ("v5e:2x4", "false")]
)
def test_forecasts_fall_with_the_number_of_recomputed_layers(topology, scan):
    peaks = [plan(config_of(remat, scan), topology).memory.peak for remat in FALLING]
    assert all(after < before for before, after in itertools.pairwise(peaks)), peaks
    assert peaks[-1] < 0.3 * peaks[0]


def test_values_on_the_host_count_as_copies_only_and_the_categories_add_up_to_the_peak():
    saved = plan(config_of("attention+mlp_up"), "v5e:2x4")
    memory = saved.memory
    assert sum(memory.at_peak.values()) == memory.peak == max(moment.total for moment in memory.timeline)
    assert memory.at_peak["parameters"] + memory.at_peak["optimizer"] <= memory.arguments

    def hosted_at(bandwidth: float) -> Plan:
        chip = replace(saved.topology.chip, host_bandwidth=bandwidth)
        return plan(config_of("attention+mlp_up@host"), replace(saved.topology, chip=chip))

    hosted, slow = hosted_at(1e12), hosted_at(1e9)
    values = 8 * 2 * 128 * 384 * 4  # layers, rows of a device, sequence, mlp size
    residuals = [each.memory.at_peak["residuals"] for each in (saved, hosted)]
    assert residuals[0] - residuals[1] == 7 * values // 8  # the residuals of one layer are on the device
    assert hosted.memory.peak < saved.memory.peak - 0.7 * values
    for bandwidth, found in ((1e12, hosted), (1e9, slow)):
        for before, after in zip(saved.time.parts[:2], found.time.parts[:2], strict=True):  # forward and backward
            assert after.host_seconds == values / bandwidth
            hidden = before.seconds if bandwidth == 1e12 else after.host_seconds
            assert after.seconds == pytest.approx(hidden, rel=0.15)


@pytest.mark.slow
def test_the_search_keeps_remat_by_name_among_its_choices():
    config = apply_overrides(load_recipe("recipes/tiny.py"), ["model.remat=attention+mlp_up:2,none"])
    found = search_layouts(config, "v5e:8", fixed=["data.batch_size", "mesh.shape"], plans=4)
    assert found.best is not None
    remats = {one.settings.get("model.remat", config.model.remat) for one in found.planned}
    assert config.model.remat in remats and len(remats) > 1
