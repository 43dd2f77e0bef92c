"""`flax-mesh plan`: its output and exit codes; and the forecast that `flax-mesh train` prints."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_mesh.cli.text.forecast
from flax_mesh.cli import main
from flax_mesh.cli.common import BAD_INPUT, DONE, FINDINGS
from flax_mesh.cli.text.forecast import compiled_bytes
from flax_mesh.cli.text.start import Programs
from flax_mesh.plan import plan
from flax_mesh.plan.topology import parse_topology
from flax_mesh.recipe.program import batch_sharding, build_program
from flax_mesh.text import bytes_text
from flax_mesh.train import apply_overrides, load_recipe
from tests.train import bigram
from tests.train.bigram import count_compilations

TINY = str(Path(__file__).parents[2] / "recipes" / "tiny.py")
SMALL = ("model.num_layers=1", "model.hidden_size=32", "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=8")


pytestmark = pytest.mark.usefixtures("on_eight_cpu_devices")


# --- flax-mesh plan ---


@pytest.mark.slow
def test_plan_prints_text_or_json_by_default_for_the_local_devices(capsys):
    found = plan(apply_overrides(load_recipe(TINY), SMALL), parse_topology("v5e:2x4"))
    command = ["plan", TINY, *SMALL, "--topology", "v5e:2x4"]
    assert main(command) == DONE
    out = capsys.readouterr().out
    assert out == f"{found.to_text()}\n"
    assert out.startswith("v5e:2x4: 8 devices, mesh dp:2,fsdp:2,tp:2\nfits: ")
    assert max(map(len, out.splitlines())) <= 80
    assert main([*command, "--json"]) == DONE
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found.to_dict()))
    assert main(["plan", TINY, *SMALL, "--json"]) == DONE
    here = plan(apply_overrides(load_recipe(TINY), SMALL), parse_topology(f"cpu:{jax.device_count()}"))
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(here.to_dict()))


def test_a_plan_that_does_not_fit_the_chip_is_exit_code_3(capsys, tmp_path):
    chip = tmp_path / "chip.toml"
    chip.write_text('base = "v5e"\nname = "small"\nmemory = 1e5\n')
    assert main(["plan", TINY, *SMALL, f"run.hardware={chip}", "--topology", "small:2x4"]) == FINDINGS
    out = capsys.readouterr().out
    assert re.search(r"^small:2x4: .*\ndoes not fit: [\d.]+ MiB of 95\.7 KiB per device, [\d.]+ MiB too much", out)
    assert re.search(r"It does not fit: [\d.]+ MiB more than a device has;", out)


@pytest.mark.slow
def test_a_plan_with_a_topology_uses_no_device():
    """JAX_PLATFORMS is not a platform, so that any access to a device fails."""
    command = [sys.executable, "-m", "flax_mesh.cli", "plan", TINY, "--topology", "v5p:2x2x2", "--json"]
    run = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "nowhere"}, capture_output=True, text=True)
    assert run.returncode == DONE, run.stderr
    assert json.loads(run.stdout)["topology"]["num_devices"] == 8


# --- the forecast of flax-mesh train ---

EVALUATES_NOTHING = "run.eval_every=0"


def test_a_run_prints_forecast_and_compiled_memory(small, capsys):
    """On the two devices of the run, which are fewer than those that are here. Arguments are the bytes of the arrays on
    one device; the program is not compiled again to look at it, nor traced again for the forecast."""
    settings = [EVALUATES_NOTHING, "data.batch_size=64"]  # more than 4 MiB, below which no number is printed
    config = apply_overrides(bigram.recipe(), [*small[2:], *settings])
    with Programs() as programs:
        assert main([*small, *settings, "run.steps=2"]) == DONE
    out = capsys.readouterr().out
    (peak,) = re.findall(r"^forecast: (.*) per device$", out, re.M)
    assert out.index("forecast: ") < out.index("start: ") < out.index("step      1")
    assert programs.of("traced")["step"].times == 1 and programs.of("lowered")["step"].times == 2
    assert (programs.of("compiled") | programs.of("read"))["step"].times == 1
    stages = "traced .*; lowered .*; (compiled|read) "
    assert re.search(rf"^start: [\d.]+ s of CPU time to the first row; {stages}", out, re.M)
    assert peak == bytes_text(plan(config, "cpu:2").memory.peak)
    assert "measured: " not in out  # CPUs do not report their memory
    forms = r"(.*) of state and batch and (.*) of temporaries per device, by XLA \(forecast (.*) and (.*)\)"
    ((arguments, temporaries, forecast, _),) = re.findall(f"^compiled step: {forms}$", out, re.M)
    program = build_program(config)
    state = program.init()
    device = program.mesh.devices.flat[0]
    on_device = [s.data for x in state.leaves for s in x.addressable_shards if s.device == device]
    batch = 2 * 4 * config.data.batch_size // 2 * config.data.sequence_length
    stored = [8 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize for x in on_device]
    total = sum(x.size * size for x, size in zip(on_device, stored, strict=True)) + batch
    assert arguments == forecast == bytes_text(total)
    assert temporaries != "0 B"
    with count_compilations() as again:
        sharding = batch_sharding(program.mesh, program.rules.axes)
        rows = np.zeros((config.data.batch_size, config.data.sequence_length), np.int32)
        batch = jax.device_put({"inputs": rows, "targets": rows}, sharding)
        program.step(state, batch)
        before = len(again)
        assert compiled_bytes(program) is not None
        assert len(again) == before


def test_the_time_is_compared_if_the_figures_of_the_chip_are_given(small, capsys, tmp_path):
    chip = tmp_path / "chip.toml"
    chip.write_text('base = "cpu"\nname = "here"\n')
    assert main([*small, EVALUATES_NOTHING, "run.steps=3", f"run.hardware={chip}"]) == DONE
    out = capsys.readouterr().out
    (before,) = re.findall(r"^forecast: .* per device, (\S+ m?s) per step, [\d,]+ tok/s", out, re.M)
    (forecast,) = re.findall(r"^measured: \S+ m?s per step \(forecast (\S+ m?s), [+-][\d.]+%\)$", out, re.M)
    assert before == forecast


def test_a_forecast_that_fails_does_not_stop_the_run_and_a_mistake_precedes_it(small, capsys, monkeypatch):
    def fail(program, topology):
        raise ZeroDivisionError("no\nforecast")

    assert main([*small, EVALUATES_NOTHING, "run.steps=1", "data.batch_size=3"]) == BAD_INPUT
    captured = capsys.readouterr()
    assert "forecast" not in captured.out + captured.err and "data.batch_size=3" in captured.err
    monkeypatch.setattr(flax_mesh.cli.text.forecast, "plan_program", fail)
    assert main([*small, EVALUATES_NOTHING, "run.steps=1"]) == DONE
    captured = capsys.readouterr()
    assert "\nforecast: none (ZeroDivisionError: no)\n" in captured.out and "Traceback" not in captured.err
