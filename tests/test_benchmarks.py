"""Every benchmark runs at its smallest size and prints a last line of JSON with its results and their origin."""

import importlib
import json
import pkgutil
import subprocess
import sys
from typing import Any

import jax
import pytest

import tests.benchmarks
from flax_mesh.recipe.checks import check_config
from flax_mesh.recipe.compiler_options import check_compiler_options, parse_compiler_options
from flax_mesh.train import apply_overrides, load_recipe
from tests.benchmarks import gpu
from tests.benchmarks.common.profile import kernels_text, summarize

QUICK = {
    "plan": ["--only", "6-8B"],
    "peers": ["--rounds", "1", "--layers", "2", "--only", "match,place,mesh"],
    "schedules": ["--cases", "5", "--seconds", "0.1"],
}
SLOW = {
    "attention": ["--masks", "causal", "--lengths", "1024", "--pairs", "1", "--heads", "2"],
    "initialization": ["--layers", "1,2"],
    "generate": ["--size", "tiny", "--tokens", "16", "--length", "16", "--prompts", "1,2", "--rounds", "1"],
    "overlap": ["--ms", "2", "--steps", "1", "--schedules", "1f1b"],
    "kernels": ["--sources", "chains", "--chains", "3"],
    "peers": ["--rounds", "1", "--only", "import"],
    "pipeline": ["--microbatches", "4", "--steps", "4"],
    "processes": ["--processes", "2", "--ms", "2", "--steps", "1", "--schedules", "1f1b"],
    "saves": ["--saves", "1"],
    "start": [
        "--runs",
        "1",
        "--settings",
        "model.num_layers=1 model.hidden_size=32 mesh.shape=fsdp:1 run.platform=cpu",
    ],
    "step": ["--rounds", "2", "--leaves", "4", "--devices", "1,2"],
}


def check(name: str, line: str) -> dict[str, Any]:
    found = json.loads(line)
    assert found["benchmark"] == name
    assert found["command"].startswith(f"python -m tests.benchmarks {name}")
    assert found["versions"].keys() >= {"python", "jax", "flax"} and found["hardware"]["cpus"] >= 1 and found["date"]
    rest = found.keys() - {"benchmark", "command", "versions", "hardware", "date"}
    assert any(found[key] for key in rest), f"no figures: {line}"
    return found


def run(name: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert importlib.import_module(f"tests.benchmarks.{name}").main(options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2, "a table comes before the JSON"
    return check(name, lines[-1])


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "plan" else ()) for n in QUICK])
def test_a_benchmark_runs(name: str, capsys: pytest.CaptureFixture[str]):
    found = run(name, QUICK[name], capsys)
    assert found["command"].endswith(" ".join(QUICK[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_slow_benchmark_runs(name: str):
    command = [sys.executable, "-m", "tests.benchmarks", name, *SLOW[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    check(name, done.stdout.splitlines()[-1])


def test_every_benchmark_is_run_here():
    names = {m.name for m in pkgutil.iter_modules(tests.benchmarks.__path__) if not m.ispkg and m.name != "__main__"}
    assert names - {"gpu"} == QUICK.keys() | SLOW.keys()  # tested below


# The benchmark of one accelerator, on a CPU

TINY = ["--tiny", "--steps=2", "--block=1", "--warmup=3"]


def row_of(capsys, *arguments):
    assert gpu.main([*TINY, *arguments]) == 0
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


def test_every_variant_is_accepted_by_the_recipe_and_the_compiler():
    recipes = {name: load_recipe(name) for name, *_ in gpu.VARIANTS.values()}
    options = set()
    for variant, (name, *words) in gpu.VARIANTS.items():
        config = apply_overrides(recipes[name], [word for word in words if not word.startswith("--")])
        assert check_config(config) == [], variant
        options.add(config.run.compiler_options)
    for text in options:
        assert check_compiler_options(parse_compiler_options(text), jax.devices()[0]) == [], text
