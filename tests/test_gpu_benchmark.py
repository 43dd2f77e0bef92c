"""The benchmark of one accelerator, run on a CPU: both of its steps are equal, and its results are consistent."""

import json

import jax
import pytest

from flax_mesh.train import apply_overrides, load_recipe
from flax_mesh.train.checks import check_compiler_options, check_config
from flax_mesh.train.config import parse_compiler_options
from tests.benchmarks import gpu
from tests.benchmarks.common.profile import kernels_text, summarize

QUICK = ["--tiny", "--steps=2", "--block=1", "--warmup=3"]


def row_of(capsys, *arguments):
    assert gpu.main([*QUICK, *arguments]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_the_handwritten_step_equals_the_step_of_the_recipe(capsys, tmp_path):
    quickly = "run.compiler_options=xla_backend_optimization_level=0"
    row = row_of(capsys, gpu.RECIPE, "model.num_layers=1", quickly, "--ceilings", f"--profile={tmp_path}")
    assert row["command"].startswith("python -m tests.benchmarks gpu --tiny") and row["versions"]["jax"] and row["date"]
    assert row["loss_difference"] < 1e-6 and len(set(row["losses"])) == 3
    assert row["ratios"].keys() == {"flax_mesh/plain", "fed/plain", "plain/plain"}
    assert f"run.compiler_options={row['options']}" == quickly
    # Per token, without the embedding: q and o, k and v, three matrices of the MLP, two norms; final norm and head.
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    assert row["flops_per_token"] == 6 * (layer + 32 + 32 * 96) + 6 * 32 * 16
    assert row["tokens_per_s"]["plain"] * row["seconds_per_step"]["plain"] == pytest.approx(4 * 16)
    assert len(row["kernels"]) == 10 and row["ceilings"].keys() == {"matmul_tflops", "copy_gbs"}


@pytest.mark.slow
def test_both_steps_are_equal_with_a_stack_and_another_one_is_detected(capsys, monkeypatch):
    settings = (gpu.LLAMA_3, "model.remat=full", "model.loss_chunk=0", "model.scan=true")
    assert row_of(capsys, *settings)["loss_difference"] < 1e-6
    monkeypatch.setattr("tests.benchmarks.common.plain_llama.rotate", lambda llama, x: x)
    assert row_of(capsys, *settings)["loss_difference"] > 1e-5


def test_kernels_are_counted_once_and_idle_time_is_time_without_kernels():
    def event(name, begin, time):
        return f"events {{ metadata_id: {name} offset_ps: {begin * 1000} duration_ps: {time * 1000} }}"

    names = ["nvjet_gemm", "fmha_kernel", "loop_add_fusion", "jit_step"]
    metadata = [f'event_metadata {{ key: {i + 1} value {{ id: {i + 1} name: "{n}" }} }}' for i, n in enumerate(names)]
    lines = [
        f'lines {{ id: 1 name: "Stream #1(Compute)" {event(1, 0, 300)} {event(2, 300, 100)} {event(1, 500, 300)} }}',
        f'lines {{ id: 2 name: "Stream #2(Compute)" {event(3, 700, 300)} }}',
        f'lines {{ id: 3 name: "XLA Modules" {event(4, 0, 1000)} }}',
    ]
    text = f'planes {{ id: 1 name: "/device:GPU:0" {" ".join(lines + metadata)} }} planes {{ id: 2 name: "/host:CPU" }}'
    data = jax.profiler.ProfileData
    kernels = summarize(data.from_serialized_xspace(data.text_proto_to_serialized_xspace(text)))
    assert [one[::2] for one in kernels.longest] == [("nvjet_gemm", 2), ("loop_add_fusion", 1), ("fmha_kernel", 1)]
    assert kernels.total == pytest.approx(1000e-9)
    assert kernels.window == pytest.approx(1000e-9) and kernels.busy == pytest.approx(900e-9)
    assert kernels.kinds == pytest.approx({"product": 600e-9, "other": 300e-9, "attention": 100e-9})
    assert "no kernel ran in 10.0%" in kernels_text(kernels, 1)


@pytest.mark.parametrize("name", gpu.VARIANTS)
def test_every_variant_is_accepted_by_the_recipe_and_the_compiler(name):
    recipe, *words = gpu.VARIANTS[name]
    config = apply_overrides(load_recipe(recipe), [word for word in words if not word.startswith("--")])
    assert check_config(config) == []
    assert check_compiler_options(parse_compiler_options(config.run.compiler_options), jax.devices()[0]) == []
