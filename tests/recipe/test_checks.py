"""Invalid settings and options that the compiler rejects: one line each, before anything large compiles."""

from dataclasses import make_dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mesh.data.corpus import load_corpus
from flax_mesh.errors import ConfigError
from flax_mesh.recipe.checks import check_config
from flax_mesh.recipe.compiler_options import check_compiler_options
from flax_mesh.recipe.explain import explain
from flax_mesh.recipe.program import FIELDS_OF_ROW
from flax_mesh.step.loss import RESERVED
from flax_mesh.train import apply_overrides, build_program, load_recipe
from flax_mesh.train.inputs import vocabulary_problems
from flax_mesh.train.metrics import Rows, StepCheck
from tests.train import bigram
from tests.train.bigram import BigramConfig, recipe
from tests.train.support.runs import run

TINY = Path(__file__).parents[2] / "recipes" / "tiny.py"


def test_settings_without_effect_are_accepted_if_the_recipe_makes_the_optimizer():
    def problems(functions: list[str], *settings: str) -> list[str]:
        config = apply_overrides(load_recipe(str(TINY)), [f"optimizer.{one}" for one in settings])
        return check_config(replace(config, **dict.fromkeys(functions, lambda *_: None)))  # which are not called

    late, start = "warmup_steps=2000", "decay_start=7"
    assert problems([], "schedule=constant", late) == []
    assert problems(["make_schedule"], late, start) == []
    assert problems(["make_optimizer"], late, start, "momentum=0.9", "matrices=kernel") == []
    (problem,) = problems(["make_schedule"], "momentum=0.9")  # which makes no optimizer
    assert problem.startswith("optimizer.momentum=0.9 has no effect with optimizer.name=adamw, only with muon or")


def test_metrics_of_rows_and_of_the_loss_may_be_the_best_metric():
    def loss(model, batch):
        loss_sum, weight = bigram.loss_fn(model, batch)
        return loss_sum, weight, {"parts": {"own": loss_sum}}

    for settings in (
        ["checkpoint.keep_best=1", "checkpoint.best_metric=grad_norm", "run.eval_every=0"],
        ["run.eval_every=0"],  # the default of a setting that is not used
        ["checkpoint.keep_best=1"],
        ["checkpoint.best_metric=parts/own"],
    ):
        build_program(replace(apply_overrides(recipe(), settings), loss_fn=loss))


METHODS = ("problems", "dims", "matrices", "problems_on", "notes_on", "without_devices", "on_mesh")
Fields = make_dataclass("Fields", [(name, str, "") for name in METHODS], bases=(BigramConfig,), frozen=True)


def test_fields_of_a_model_config_may_have_the_names_of_its_optional_methods():
    config = apply_overrides(replace(recipe(), model=Fields()), ["mesh.shape=fsdp:2"])
    build_program(config)
    explain(config)
    with pytest.raises(ConfigError, match=r"^optimizer\.name=muon: no trained parameter is a matrix"):
        build_program(apply_overrides(config, ["optimizer.name=muon"]))


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_a_deeply_nested_json_file_of_a_start_is_one_line(tmp_path, depth):
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"a":' * depth + "1" + "}" * depth)
    config = apply_overrides(load_recipe(str(TINY)), [f"checkpoint.start_from={tmp_path}"])
    found = check_config(config)
    assert found and all(line.startswith("checkpoint.start_from: ") for line in found)
    assert max(map(len, found)) < 1000


def test_a_vocabulary_beyond_uint16_needs_files_of_uint32(tmp_path):
    np.arange(10_000, dtype="<u2").tofile(tmp_path / "tokens.bin")
    large = replace(recipe(), model=BigramConfig(vocab_size=128_256))
    large = apply_overrides(large, [f"data.source={tmp_path / 'tokens.bin'}"])
    (problem,) = vocabulary_problems(large.model.vocab_size, load_corpus(large.data), large.data.source)
    assert problem.startswith("model.vocab_size=128256 is more than the 65536 ids of uint16, ")
    assert "Set data.bin_dtype=uint32" in problem
    large = apply_overrides(large, ["data.bin_dtype=uint32"])
    assert vocabulary_problems(large.model.vocab_size, load_corpus(large.data), large.data.source) == []
    small = apply_overrides(recipe(), [f"data.source={tmp_path / 'tokens.bin'}"])
    assert vocabulary_problems(small.model.vocab_size, load_corpus(small.data), small.data.source) == []


def test_options_are_checked_by_the_compiler():
    check = partial(check_compiler_options, device=jax.devices()[0])
    assert check({"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_autotune_level": 4}) == []
    unknown, wrong = check({"xla_no_such_option": 1, "xla_gpu_autotune_level": "high"})
    assert unknown.startswith("run.compiler_options: xla_no_such_option=1 is refused: ") and "No such" in unknown
    assert wrong.startswith("run.compiler_options: xla_gpu_autotune_level=high is refused: ")


def test_a_run_prints_and_uses_its_options(tmp_path, text):
    dump = f"xla_dump_to={tmp_path / 'dump'}"
    settings = [f"data.source={text}", f"run.folder={tmp_path / 'run'}", "run.steps=1", "run.eval_every=0"]
    ran = run(apply_overrides(recipe(), [*settings, "run.sample_tokens=0", f"run.compiler_options={dump}"]))
    assert f"compiler: {dump}" in ran.lines
    assert list((tmp_path / "dump").glob("*jit_step*"))


def test_the_mfu_uses_the_peak_of_a_hardware_file(tmp_path):
    (tmp_path / "chip.toml").write_text('base = "cpu"\npeak_flops = {bfloat16 = 2e9}\n')
    for settings, peak in [([], None), ([f"run.hardware={tmp_path / 'chip.toml'}"], 2e9)]:
        config = replace(apply_overrides(recipe(), settings), flops_per_token=lambda model, parameters, length: 1e3)
        program = build_program(config)
        rows = Rows(None, program, 3, StepCheck(config.run, {}), hooks=[], say=print, warn_or_raise=print)
        rows.begin(1, {"loss": jnp.float32(2), "grad_norm": jnp.float32(1)}, 0.0)
        rows.finish()
        expected = peak and rows.last["tokens_per_s"] * 1e3 / (peak * program.mesh.size)
        assert rows.last["mfu"] == (expected and pytest.approx(expected))
        assert rows.last.keys() <= {*RESERVED, *FIELDS_OF_ROW}
