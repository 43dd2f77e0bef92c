"""Invalid settings and options that the compiler rejects: one line each, before anything large compiles."""

import re
from dataclasses import make_dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mesh.errors import ConfigError
from flax_mesh.models import next_token_loss
from flax_mesh.step.loss import RESERVED
from flax_mesh.train import apply_overrides, build_program, load_recipe, train
from flax_mesh.train.build import FIELDS_OF_ROW
from flax_mesh.train.checks import check_compiler_options, check_config, check_on_corpus
from flax_mesh.train.data.data import load_corpus
from flax_mesh.train.explain import explain
from flax_mesh.train.metrics import Rows, StepCheck
from tests.train.bigram import BigramConfig, loss_fn, recipe, write_text

TINY = Path(__file__).parents[2] / "recipes" / "tiny.py"


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("run.steps=0", "run.steps must be at least 1, got 0"),
        ("checkpoint.keep=0", "checkpoint.keep must be at least 1, got 0"),
        ("run.seed=-1", "run.seed must be at least 0, got -1"),
        ("run.seed=4294967296", "run.seed must be below 4294967296, got 4294967296"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate must be at least 0 and finite, got nan"),
        ("optimizer.clip_norm=0", "optimizer.clip_norm must be above 0, or inf for no clipping, got 0.0"),
        ("optimizer.warmup_steps=200", "optimizer.warmup_steps=200 must be below optimizer.decay_steps=150"),
        ("pipeline.num_microbatches=3", "data.batch_size=16 is not divisible by pipeline.num_microbatches=3"),
        ("data.batch_size=0", "data.batch_size must be at least 1, got 0"),
        ("optimizer.shard_over=dp,data", "optimizer.shard_over: 'data' is not a mesh axis; use dp, fsdp, ep"),
        ("optimizer.shard_over=dp,fsdp,dp", "optimizer.shard_over=dp,fsdp,dp has dp twice; remove one"),
        ("mesh.shape=pp:-1", "mesh.shape=pp:-1 leaves the size of pp to the number of devices; set it"),
        ("pipeline.cut=2;3", "pipeline.cut must be flops, count, or the first layer of every stage but the first"),
        ("pipeline.remat=keep", "pipeline.remat must be one of none, cheap, full, got 'keep'"),
        ("pipeline.check=sometimes", "pipeline.check must be one of auto, always, never, got 'sometimes'"),
        ("pipeline.transport=nccl", "pipeline.transport must be one of auto, server, ordered, got 'nccl'"),
        ("mesh.shape=dp:two", r"mesh.shape: .*'dp:two' is malformed"),
        ("mesh.shape=dp:-1,tp:-1", r"mesh.shape: .*only one size can be -1"),
        ("run.platform=npu", r"run.platform must be auto, cpu, cpu:N \(N devices\), gpu or tpu, got 'npu'"),
        ("run.platform=cuda", "run.platform must be .*got 'cuda'"),
        ("run.platform=cpu:0", "run.platform must be .*got 'cpu:0'"),
        ("run.platform=gpu:2", "run.platform must be .*got 'gpu:2'"),
        ("run.folder=", "run.folder is empty; name a folder, such as runs/default"),
        ("optimizer.b1=2", "optimizer.b1 must be below 1, got 2.0"),
        ("model.rope_theta=nan", "model.rope_theta must be above 0 and finite, got nan"),
        ("model.axes.batch_axis=nope", "model.axes.batch_axis: 'nope' is not a mesh axis; use dp, fsdp, .* or none"),
        ("model.axes.head_axis=tp,pp", "model.axes.head_axis: 'pp' is not a mesh axis"),
        ("run.folder=~no_such_user/x", "run.folder names a user without a home folder"),
        (f"run.folder={'x' * 5000}", "run.folder is too long for a path: 5000 bytes"),
        (f"data.source={'x' * 5000}", "data.source is too long for a path: 5000 bytes"),
        (f"checkpoint.start_from={'x' * 5000}", "checkpoint.start_from is too long for a path: 5000 bytes"),
        ("checkpoint.start_from=~no_such_user/x", "checkpoint.start_from names a user without a home folder"),
        ("run.hardware=nothing.toml", r"run.hardware: nothing.toml: no such file; it must be a TOML file"),
        (f"run.hardware={TINY}", r"run.hardware: .*tiny.py is not a TOML file: "),
        ("model.head_dim=3", "model.head_dim must be even for rotary positions, got 3"),
    ],
)
def test_an_invalid_value_is_reported_in_one_line(setting, problem):
    tiny = load_recipe(str(TINY))
    assert check_config(tiny) == []
    found = check_config(apply_overrides(tiny, [setting]))
    assert len(found) == 1 and re.match(problem, found[0]), found


@pytest.mark.parametrize(
    ("functions", "settings"),
    [
        ("", ["schedule=constant", "warmup_steps=2000"]),
        ("make_schedule", ["warmup_steps=2000", "decay_start=7"]),
        ("make_optimizer", ["warmup_steps=2000", "decay_start=7", "momentum=0.9", "matrices=kernel"]),
    ],
)
def test_settings_that_the_named_optimizer_does_not_use_may_be_those_of_the_recipe(functions, settings):
    config = apply_overrides(load_recipe(str(TINY)), [f"optimizer.{one}" for one in settings])
    own = dict.fromkeys(functions.split(), lambda *_: None)  # not called
    assert check_config(replace(config, **own)) == []
    if functions == "make_schedule":  # which makes no optimizer
        (problem,) = check_config(replace(apply_overrides(config, ["optimizer.momentum=0.9"]), **own))
        assert problem.startswith("optimizer.momentum=0.9 has no effect with optimizer.name=adamw, only with muon or")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            ["checkpoint.best_metric=accuracy"],
            "best_metric=accuracy is in no row of metrics, which have loss",
        ),
        (
            ["checkpoint.keep_best=1", "run.eval_every=0"],
            "best_metric=eval_loss is in no row .*run.eval_every",
        ),
        (["checkpoint.keep_best=1", "checkpoint.best_metric=grad_norm", "run.eval_every=0"], None),
        (["run.eval_every=0"], None),  # the default of a setting that is not used
        (["checkpoint.keep_best=1"], None),
    ],
)
def test_a_best_metric_that_no_row_has_is_refused(settings, problem):
    config = apply_overrides(recipe(), settings)
    if problem is None:
        build_program(config)
        return
    with pytest.raises(ConfigError, match=problem):
        build_program(config)


def test_metrics_of_the_loss_may_be_the_best_metric():
    def loss(model, batch):
        loss_sum, weight = loss_fn(model, batch)
        return loss_sum, weight, {"parts": {"own": loss_sum}}

    config = replace(apply_overrides(recipe(), ["checkpoint.best_metric=parts/own"]), loss_fn=loss)
    build_program(config)


ROW_METRICS = {
    "names": (
        lambda loss: dict.fromkeys(["own", "step", "skipped", "eval_loss", "tokens_per_s"], loss),
        "must have names of their own: rows of metrics.jsonl have 'eval_loss', 'skipped', 'step', 'tokens_per_s' "
        "already. Rename them",
    ),
    "numbers": (
        lambda loss: {"own": loss, "three": jnp.ones(3), "a": {"b": loss * 1j}},
        r"must be real scalars, but 'a/b' is c64\[\], 'three' is f32\[3\]\. Return their sums",
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("case", "mesh"), [("names", "dp:2"), ("names", "pp:2"), ("numbers", "dp:2"), ("numbers", "pp:2")]
)
def test_metrics_of_the_loss_that_no_row_can_have_are_refused_together(case, mesh):
    metrics, problem = ROW_METRICS[case]

    def loss(model, batch):
        loss_sum, weight = next_token_loss(model, batch)[:2]
        return loss_sum, weight, metrics(loss_sum)

    small = ["model.num_layers=2", "model.hidden_size=32", "data.sequence_length=16", "run.platform=auto"]
    config = replace(apply_overrides(load_recipe(str(TINY)), [*small, f"mesh.shape={mesh}"]), loss_fn=loss)
    with pytest.raises(ConfigError) as caught:
        build_program(config)
    found = rf"^loss_fn: .*test_checks.py, line \d+: metrics of loss_fn {problem}.*$"
    assert re.fullmatch(found, str(caught.value)), caught.value


METHODS = ("problems", "dims", "matrices", "problems_on", "notes_on", "without_devices")
Fields = make_dataclass("Fields", [(name, str, "") for name in METHODS], bases=(BigramConfig,), frozen=True)


def test_fields_of_a_model_config_may_have_the_names_of_its_optional_methods():
    config = apply_overrides(replace(recipe(), model=Fields()), ["mesh.shape=fsdp:2"])
    build_program(config)
    explain(config)
    with pytest.raises(ConfigError, match=r"^optimizer\.name=muon: no trained parameter is a matrix"):
        build_program(apply_overrides(config, ["optimizer.name=muon"]))


@pytest.mark.parametrize("mesh", ["dp:2", "pp:2"])
@pytest.mark.parametrize(
    ("wrt", "problem"),
    [
        (3, "wrt must be a filter of NNX, such as nnx.Param or a function of path and variable, got 3"),
        ((nnx.Param, 3), "wrt must be a filter of NNX, .* got .*, 3.$"),
        (..., "wrt=... selects all variables, also the counts of random streams, .* such as nnx.Param$"),
        (True, "wrt=True selects all variables"),
        (
            lambda path: True,
            r"wrt: .*test_checks.py, line \d+: it must be callable with the arguments .path, variable.",
        ),
        ([nnx.LoRAParam, lambda: True], r"wrt: .*test_checks.py, line \d+: it must be callable with the arguments"),
        (lambda path, variable: {}["x"], r"wrt: .*test_checks.py, line \d+: KeyError: 'x'"),
        (None, "wrt=None must match a variable of the model"),
    ],
    ids=range(8),
)
def test_a_wrong_filter_of_what_is_trained_is_one_line(wrt, problem, mesh):
    small = ["model.num_layers=2", "model.hidden_size=32", "run.platform=auto", f"mesh.shape={mesh}"]
    with pytest.raises(ConfigError) as caught:
        build_program(replace(apply_overrides(load_recipe(str(TINY)), small), wrt=wrt))
    assert len(caught.value.problems) == 1 and re.match(problem, str(caught.value)), caught.value


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_a_deeply_nested_json_file_of_a_start_is_one_line(tmp_path, depth):
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"a":' * depth + "1" + "}" * depth)
    config = apply_overrides(load_recipe(str(TINY)), [f"checkpoint.start_from={tmp_path}"])
    found = check_config(config)
    assert found and all(line.startswith("checkpoint.start_from: ") for line in found)
    assert max(map(len, found)) < 1000


def test_a_vocabulary_beyond_uint16_needs_files_of_uint32(tmp_path):
    np.arange(5000, dtype="<u4").tofile(tmp_path / "tokens.bin")
    large = replace(recipe(), model=BigramConfig(vocab_size=128_256))
    large = apply_overrides(large, [f"data.source={tmp_path / 'tokens.bin'}"])
    (problem,) = check_on_corpus(large, load_corpus(large.data))
    assert re.match(
        r"model.vocab_size=128256 is more than the 65536 ids of uint16, .* Set data.bin_dtype=uint32", problem
    )
    large = apply_overrides(large, ["data.bin_dtype=uint32"])
    assert check_on_corpus(large, load_corpus(large.data)) == []
    small = apply_overrides(recipe(), [f"data.source={tmp_path / 'tokens.bin'}"])
    assert check_on_corpus(small, load_corpus(small.data)) == []


def test_all_mistakes_in_the_options_are_reported_at_once(tmp_path):
    text = "fast,xla_a=1,--xla_b=2,xla_a=3"
    config = apply_overrides(recipe(), [f"run.compiler_options={text}", "run.steps=0"])
    assert check_config(config) == [
        "run.steps must be at least 1, got 0",
        "run.compiler_options: 'fast' is not an option; write NAME=VALUE, such as "
        "xla_gpu_enable_latency_hiding_scheduler=true",
        "run.compiler_options: '--xla_b=2' is not an option; write NAME=VALUE, such as "
        "xla_gpu_enable_latency_hiding_scheduler=true",
        "run.compiler_options: xla_a is set twice",
    ]


def test_options_are_checked_by_the_compiler():
    check = partial(check_compiler_options, device=jax.devices()[0])
    assert check({"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_autotune_level": 4}) == []
    unknown, wrong = check({"xla_no_such_option": 1, "xla_gpu_autotune_level": "high"})
    assert unknown.startswith("run.compiler_options: xla_no_such_option=1 is refused: ") and "No such" in unknown
    assert wrong.startswith("run.compiler_options: xla_gpu_autotune_level=high is refused: ")


def test_a_run_prints_and_uses_its_options_and_rejects_unknown_ones(tmp_path):
    text, printed = write_text(tmp_path), []
    base = [f"data.source={text}", f"run.folder={tmp_path / 'run'}", "run.steps=1", "run.eval_every=0",
            "run.sample_tokens=0"]  # fmt: skip
    with pytest.raises(ConfigError, match=r"run.compiler_options: xla_fast=true is refused"):
        train(apply_overrides(recipe(), [*base, "run.compiler_options=xla_fast=true"]))
    assert not (tmp_path / "run").exists()
    dump = f"xla_dump_to={tmp_path / 'dump'}"
    train(apply_overrides(recipe(), [*base, f"run.compiler_options={dump}"]), say=printed.append)
    assert f"compiler: {dump}" in printed
    assert list((tmp_path / "dump").glob("*jit_step*"))


def test_the_peak_of_the_mfu_is_that_of_a_hardware_file(tmp_path):
    (tmp_path / "chip.toml").write_text('base = "cpu"\npeak_flops = {bfloat16 = 2e9}\n')
    for settings, peak in [([], None), ([f"run.hardware={tmp_path / 'chip.toml'}"], 2e9)]:
        config = replace(apply_overrides(recipe(), settings), flops_per_token=lambda model, parameters, length: 1e3)
        program = build_program(config)
        rows = Rows(None, program, 3, StepCheck(config.run, {}), hooks=[], say=print, warn_or_raise=print)
        rows.begin(1, {"loss": np.float32(2), "grad_norm": np.float32(1)}, 0.0)
        rows.finish()
        expected = peak and rows.last["tokens_per_s"] * 1e3 / (peak * program.mesh.size)
        assert rows.last["mfu"] == (expected and pytest.approx(expected))
        assert rows.last.keys() <= {*RESERVED, *FIELDS_OF_ROW}
