"""Mistakes in settings and in functions of a recipe: one line each, before the run has a folder.

Two tables: settings -> the lines about them, and a field of the recipe with a wrong value -> the text of the error,
which names the file and a line of the function.
"""

import inspect
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh.errors import ConfigError
from flax_mesh.models import next_token_loss
from flax_mesh.recipe.checks import check_config
from flax_mesh.train import DataConfig, TrainConfig, apply_overrides, build_program, load_recipe, mean_metrics, train
from tests.data import user_recipe
from tests.train import bigram
from tests.train.bigram import count_compilations

pytestmark = pytest.mark.usefixtures("quick_compilation")
TINY = Path(__file__).parents[2] / "recipes" / "tiny.py"

# --- settings, of recipes/tiny.py; values outside of the limits of single ones are in tests/test_fields.py ---

SETTINGS: list[tuple[str, str]] = [
    ("run.seed=4294967296", "run.seed must be below 4294967296, got 4294967296"),
    ("run.platform=npu", r"run.platform must be auto, cpu, cpu:N \(N devices\), gpu or tpu, got 'npu'"),
    ("run.platform=cpu:0", "run.platform must be .*got 'cpu:0'"),
    ("run.folder=", "run.folder is empty; name a folder, such as runs/default"),
    ("run.hardware=nothing.toml", r"run.hardware: nothing.toml: no such file; it must be a TOML file"),
    (f"run.hardware={TINY}", r"run.hardware: .*tiny.py is not a TOML file: "),
    ("run.spike_factor=nan", "run.spike_factor must be above 1 and finite, or 0 for no limit, got nan"),
    ("mesh.shape=pp:-1", "mesh.shape=pp:-1 leaves the size of pp to the number of devices; set it"),
    ("mesh.shape=dp:two", r"mesh.shape: .*'dp:two' is malformed"),
    ("mesh.shape=dp:-1,tp:-1", r"mesh.shape: .*only one size can be -1"),
    ("mesh.rules=fdsp+tp", "mesh.rules: 'fdsp' is not a mesh axis; use dp, fsdp, ep, tp, sp, joined by"),
    ("pipeline.num_microbatches=3", "data.batch_size=16 is not divisible by pipeline.num_microbatches=3"),
    ("pipeline.cut=2;3", "pipeline.cut must be flops, count, or the first layer of every stage but the first"),
    ("model.num_layers=100000000", "model.num_layers=100000000 must be at most 1,000, because every layer is traced; "),
    ("model.head_dim=3", "model.head_dim must be even for rotary positions, got 3"),
    ("model.axes.batch_axis=nope", "model.axes.batch_axis: 'nope' is not a mesh axis; use dp, fsdp, .* or none"),
    ("model.axes.head_axis=tp,pp", "model.axes.head_axis: 'pp' is not a mesh axis"),
    ("data.source=", "data.source must be 'stdlib', a file, a folder or a glob; got an empty string"),
    ("optimizer.warmup_steps=200", "optimizer.warmup_steps=200 must be below optimizer.decay_steps=150"),
    ("optimizer.decay_start=500", "optimizer.decay_start=500 has no effect with optimizer.schedule=cosine, only with"),
    ("optimizer.shard_over=dp,data", "optimizer.shard_over: 'data' is not a mesh axis; use dp, fsdp, ep"),
    ("optimizer.shard_over=dp,fsdp,dp", "optimizer.shard_over=dp,fsdp,dp has dp twice; remove one"),
    ("optimizer.groups=embed", "optimizer.groups: 'embed' has no words; write PATTERN WORDS"),
    ("optimizer.groups=a learning_rate=0.1", "optimizer.groups: 'learning_rate=0.1' of 'a' is neither frozen"),
    ("optimizer.groups=a frozen learning_rate*2", "optimizer.groups: 'a' is frozen, so its factors have no effect"),
    ("optimizer.groups=a learning_rate*2 learning_rate*3", r"optimizer.groups: 'a' has 'learning_rate\*3' twice"),
    ("optimizer.groups=( frozen", r"optimizer.groups: '\(' must be a regular expression, but missing \)"),
    ("optimizer.no_decay=[", r"optimizer.no_decay: '\[' must be a regular expression, but unterminated character set"),
    ("optimizer.matrices=a", "optimizer.matrices=a has no effect with optimizer.name=adamw, only with muon"),
    ("optimizer.momentum=0.5", "optimizer.momentum=0.5 has no effect with optimizer.name=adamw, only with muon or"),
]


@pytest.mark.parametrize(("setting", "problem"), SETTINGS)
def test_an_invalid_value_is_reported_in_one_line(setting: str, problem: str):
    tiny = load_recipe(str(TINY))
    assert check_config(tiny) == []
    found = check_config(apply_overrides(tiny, [setting]))
    assert len(found) == 1 and re.match(problem, found[0]) and "\n" not in found[0], found


MUON, ADAFACTOR, BFLOAT16 = "optimizer.name=muon", "optimizer.name=adafactor", "optimizer.moment_dtype=bfloat16"
WSD = "optimizer.decay_start={} must be at least optimizer.warmup_steps=20 and below"
SEVERAL: list[tuple[tuple[str, ...], list[str]]] = [
    (
        ("model.num_layers=2000", "model.scan=true", "mesh.shape=pp:2,dp:4"),
        ["model.num_layers=2000 must be at most 1,000, because the stages of a pipeline trace every layer; use fewer"],
    ),
    (
        ("run.steps=0", "run.compiler_options=fast,xla_a=1,--xla_b=2,xla_a=3"),
        [
            "run.steps must be at least 1, got 0",
            "run.compiler_options: 'fast' is not an option; write NAME=VALUE, such as xla_gpu_enable_latency",
            "run.compiler_options: '--xla_b=2' is not an option; write NAME=VALUE, such as xla_gpu_enable_latency",
            "run.compiler_options: xla_a is set twice",
        ],
    ),
    (("optimizer.groups=a learning_rate*-1; b weight_decay*x; c learning_rate*inf",), ["optimizer.groups: "] * 3),
    ((MUON, "optimizer.matrices=a 0>0"), ["optimizer.matrices: '0>0' of 'a' must be input and output dims"]),
    ((MUON, "optimizer.matrices=a 0"), ["optimizer.matrices: '0' of 'a' must be input and output dims"]),
    ((MUON, "optimizer.matrices=("), ["optimizer.matrices: '(' must be a regular expression"]),
    (
        ("optimizer.name=sgd", "optimizer.b1=0.5", "optimizer.momentum=0", "optimizer.moment_dtype=float32"),
        [
            "optimizer.b1=0.5 has no effect with optimizer.name=sgd, only with adamw or muon; remove it",
            "optimizer.moment_dtype=float32 has no effect with optimizer.name=sgd without momentum; remove it, or",
        ],
    ),
    (
        (ADAFACTOR, "optimizer.epsilon=1e-6", "optimizer.b2=0.9"),
        [
            "optimizer.b2=0.9 has no effect with optimizer.name=adafactor, only with adamw or muon; remove it",
            "optimizer.epsilon=1e-06 has no effect with optimizer.name=adafactor, only with adamw or muon; remove it",
        ],
    ),
    ((ADAFACTOR, BFLOAT16), [f"{BFLOAT16} has no effect"]),
    ((ADAFACTOR, "optimizer.momentum=0.9", BFLOAT16), []),
    (("optimizer.name=sgd", BFLOAT16), []),
    *((("optimizer.schedule=wsd", f"optimizer.decay_start={start}"), [WSD.format(start)]) for start in (19, 150)),
]


@pytest.mark.parametrize(("settings", "problems"), SEVERAL)
def test_all_mistakes_in_settings_are_reported_together(settings: tuple[str, ...], problems: list[str]):
    found = check_config(apply_overrides(load_recipe(str(TINY)), settings))
    assert len(found) == len(problems)
    for line, start in zip(found, problems, strict=True):
        assert line.startswith(start) and "\n" not in line


ON_DEVICES: list[tuple[tuple[str, ...], str]] = [
    (("run.steps=0", "data.batch_size=0"), r"^data\.batch_size .*\nrun\.steps "),
    (("mesh.shape=dp:8", "data.batch_size=12"), r"^data\.batch_size=12 is not divisible by 8 \(dp=8\); use a mu"),
    (
        ("mesh.shape=dp:4", "pipeline.num_microbatches=4"),
        r"^data\.batch_size=8 / pipeline\.num_microbatches=4 is not divisible by 4 \(dp=4\)",
    ),
    (("mesh.shape=sp:8", "data.sequence_length=12"), r"^data\.sequence_length=12 is not divisible by 8 \(sp=8\)"),
    (("mesh.shape=dp:3", "run.platform=cpu"), r"^mesh.shape=dp:3: .*multiply to 3.* 8.*dp:8"),
    (("model.vocab_size=200",), r"^model\.vocab_size=200 is too small for data\.source=.*: text needs 256$"),
    (("data.held_out=0.005",), r"^data\.held_out: the held-out part has .* windows"),
    (("mesh.shape=tp:8", "model.vocab_size=257"), r"head/kernel: dim 1 has size 257, not divisible by 8"),
    (("run.compiler_options=xla_fast=true",), r"^run.compiler_options: xla_fast=true is refused"),
    (("checkpoint.best_metric=accuracy",), "best_metric=accuracy is in no row of metrics, which have loss"),
    (("run.profile=20",), r"^run.profile=20 records the steps 3 to 22, but run.steps=12 ends before that"),
    (("run.hooks=tensorbord",), r"^run.hooks: 'tensorbord' must be tensorboard, .* or .* did you mean tensorboard\?"),
    (("run.hooks=no.such.module",), r"^run.hooks: 'no.such.module' cannot be .* 'no.such' does not exist. Install"),
    (("run.hooks=os.path.join, os.path.join",), r"^run.hooks: 'os.path.join' is there twice; once is enough"),
    (("run.hooks=os.path.nope",), r"^run.hooks: 'os.path.nope' cannot be imported: os.path has no 'nope'$"),
    (("run.hooks=math.pi",), r"^run.hooks=math.pi must be a function \(folder, config, start\) -> hook, got 3.14"),
    (("run.hooks=os.getcwd",), r"^run.hooks=os.getcwd: it must be callable with the .*\(folder, config, start\)"),
    (("run.hooks=a,b",), r"^run.hooks: 'a' must be .*\nrun.hooks: 'b' must be"),
    (("run.hooks=.x",), r"^run.hooks: '.x' must be tensorboard"),
]


@pytest.mark.parametrize(("settings", "problem"), ON_DEVICES)
def test_settings_that_do_not_fit_stop_before_anything_is_compiled_or_written(settings, problem, tmp_path, text):
    config = apply_overrides(bigram.recipe(), [f"data.source={text}", f"run.folder={tmp_path / 'run'}", *settings])
    with count_compilations() as compiled, pytest.raises(ValueError, match=problem):
        train(config)
    assert len(compiled) <= ("compiler_options" in settings[0])
    assert not (tmp_path / "run").exists()


PATTERNS: list[tuple[tuple[str, ...], str]] = [
    (("optimizer.groups=nothing weight_decay*0",), r"^optimizer.groups: no trained parameter has 'nothing' in "),
    (("optimizer.groups=nothing frozen",), r"^optimizer.groups: no variable of the model has 'nothing' in its "),
    (("optimizer.no_decay=nothing",), r"^optimizer.no_decay: no trained parameter has 'nothing' in its path; the"),
    (("optimizer.groups=. frozen",), r"^wrt=Param without the frozen groups of optimizer.groups must match a variable"),
    ((MUON, "optimizer.matrices=kernel"), r"^optimizer.matrices: .*/attention/k/kernel has 3 dims; write which are in"),
    ((MUON, "optimizer.matrices=mlp/.*/kernel 0>1,2"), r"^optimizer.matrices: layers/.* has 2 dims"),
    ((MUON, "optimizer.matrices=x/kernel"), r"(?s)no trained parameter has.*trained parameter is"),
]


@pytest.mark.parametrize(("mesh", "settings", "problem"), [("pp", *PATTERNS[0]), *(("plain", *x) for x in PATTERNS)])
def test_patterns_that_do_not_fit_the_parameters_are_an_error(mesh: str, settings: tuple[str, ...], problem: str):
    config = apply_overrides(user_recipe.recipe(), user_recipe.MESHES[mesh])
    with pytest.raises(ConfigError, match=problem):
        build_program(apply_overrides(config, settings))


# --- functions and objects of a recipe ---


def numbers(value: Any) -> Any:
    return lambda config, evaluate: value


def evaluated(batch: Any) -> Any:
    return lambda config, evaluate: evaluate(batch)


class Ends:
    """An iterator without a batch; called as an object, it returns no iterator."""

    def __init__(self, config: Any = None):
        self.config = config

    def __next__(self) -> Any:
        raise StopIteration

    def get_state(self) -> Any:
        return 0

    def set_state(self, state: Any) -> None:
        pass

    def __call__(self, config: Any) -> Any:
        return 3


class Objects(Ends):
    """Batches of an object-dtype array, whose bytes are pointers."""

    def __next__(self) -> Any:
        return {"x": np.array([object() for _ in range(ROWS)])}


class Forgets(user_recipe.Windows):
    def set_state(self, state: Any) -> None:
        pass


UNKNOWN = type("Unknown", (), {"__init__": lambda *_: None})  # a class without a place


def loss_with(metrics: Any) -> Any:
    """A loss with metrics, which are `metrics` of the loss."""

    def loss(model: Any, batch: Any) -> Any:
        loss_sum, weight = bigram.loss_fn(model, batch)
        return loss_sum, weight, metrics(loss_sum)

    return loss


def own(init: Any = lambda parameters: jnp.zeros(()), update: Any = lambda g, s, p: (g, s)) -> Any:
    return optax.GradientTransformation(init, update)


def first_batch(batch: Any) -> Any:
    return lambda config: lambda step: batch


ROWS = 8
TOKENS = np.zeros((ROWS, 32), np.int32)
LOSS_FORMS = "loss_fn must return loss, .* It returned"
WITH_ARGUMENTS = r"it must be callable with the arguments"
PLACE = r"test_mistakes\.py, line \d+: "
ROW_METRICS: list[tuple[Any, str]] = [
    (
        lambda loss: dict.fromkeys(["own", "step", "skipped", "eval_loss", "tokens_per_s"], loss),
        "must have names that the rows do not use: rows of metrics.jsonl have 'eval_loss', 'skipped', 'step', "
        "'tokens_per_s' already. Rename them",
    ),
    (
        lambda loss: {"own": loss, "three": jnp.ones(3), "a": {"b": loss * 1j}},
        r"must be real scalars, but 'a/b' is c64\[\], 'three' is f32\[3\]\. Return their sums",
    ),
]
# A field of the recipe, its value, and the text of the error.
FUNCTIONS: list[tuple[str, Any, str]] = [
    ("loss_fn", lambda model, batch: None, rf"{LOSS_FORMS} None\."),
    ("loss_fn", lambda model, batch: "loss", rf"{LOSS_FORMS} str\."),
    ("loss_fn", lambda model, batch: model(batch["inputs"]), rf"{LOSS_FORMS} f32\[8,32,256\]\."),
    ("loss_fn", lambda model: 1, WITH_ARGUMENTS + " .model, batch."),
    ("loss_fn", lambda model, batch: batch["labels"], "KeyError: 'labels'"),
    ("loss_fn", lambda model, batch: sys.exit(0), "SystemExit: 0"),
    ("loss_fn", lambda m, batch: m(batch["inputs"]).sum() * (1 / (not m.dropout.deterministic)), "ZeroDivisionError"),
    *(("loss_fn", loss_with(metrics), f"metrics of loss_fn {problem}") for metrics, problem in ROW_METRICS),
    ("make_model", lambda config, rngs: config.no_field, "AttributeError"),
    ("make_model", lambda config, rngs: None, "it must return an nnx.Module, got NoneType"),
    ("make_model", lambda config: None, WITH_ARGUMENTS + " .config, rngs."),
    ("flops_per_token", lambda model, count, length: None, "it must return a number"),
    ("make_optimizer", lambda config, given: 3, "it must return an"),
    ("make_optimizer", lambda config, given: 1 / 0, "ZeroDivisionError"),
    ("make_optimizer", lambda config: optax.sgd(1.0), WITH_ARGUMENTS + " .config, parameters."),
    ("make_optimizer", lambda *_: own(lambda p: {}["x"]), "the init of its optimizer: .*KeyError: 'x'"),
    ("make_optimizer", lambda *_: own(update=lambda g, s, p: {}["x"]), "the update of its .*KeyError: 'x'"),
    ("make_optimizer", lambda config, _: optax.adam(config), "TypeError: unsupp"),
    ("make_optimizer", lambda *_: own(update=lambda g, s, p: g), "updates, state., .*it returns an object"),
    ("make_optimizer", lambda *_: own(update=lambda g, s, p: (0.0, s)), "the updates have another structure"),
    ("make_optimizer", lambda *_: own(update=lambda g, s, p: (g, (s, s))), "the arrays of the state have another"),
    (
        "make_optimizer",
        lambda *_: own(update=lambda g, s, p: (jax.tree.map(jnp.atleast_3d, g), s)),
        r"embed/embedding: \(256, 64\) becomes \(256, 64, 1\)",
    ),
    (
        "make_optimizer",
        lambda *_: own(
            lambda p: {"n": jnp.zeros((), jnp.bfloat16)}, lambda g, s, p: (g, {"n": s["n"] + np.float32(1)})
        ),
        r": n: bf16\[\] becomes f32\[\]; make_optimizer\(config, parameters\) must return",
    ),
    ("make_schedule", lambda config: 3, r"it must return a function of the step .* got int"),
    ("make_schedule", lambda config: jnp.atleast_1d, "a function that returns the shape"),
    ("wrt", 3, "wrt must be a filter of NNX, such as nnx.Param or a function of path and variable, got 3"),
    ("wrt", (nnx.Param, 3), "wrt must be a filter of NNX, .* got .*, 3.$"),
    ("wrt", ..., "wrt=... selects all variables, also the counts of random streams, .* such as nnx.Param$"),
    ("wrt", lambda path: True, WITH_ARGUMENTS + " .path, variable."),
    ("wrt", [nnx.LoRAParam, lambda: True], rf"wrt: .*{PLACE}{WITH_ARGUMENTS}"),
    ("wrt", lambda path, variable: {}["x"], "KeyError: 'x'"),
    ("wrt", None, "wrt=None must match a variable of the model"),
    ("sample", lambda model, prompt, count, key: 0, "sample continues text .* with make_batches, set sample=None$"),
    ("make_batches", lambda: None, WITH_ARGUMENTS + " .config."),
    ("make_batches", lambda config: None, "must return a function of the step, or an iterator .*, got NoneType"),
    (
        "make_batches",
        lambda config: iter([1]),
        "got list_iterator, which has no get_state and no set_state. .*data.resumable=f",
    ),
    ("data", DataConfig(resumable=False), r"data\.resumable=false is for iterators that make_batches returns; remove"),
    ("make_batches", lambda config: lambda step: {}["x"], "batch 0: .*KeyError: 'x'"),
    ("make_batches", UNKNOWN, "^make_batches: it must return a function of"),
    ("make_batches", Forgets, r"after set_state\(get_state\(\)\) the iterator returns another batch"),
    ("make_batches", Ends, "the iterator ended before batch 0; it must return one batch"),
    ("make_batches", Ends(), "it must return a function of the step, or an iterator .*, got int"),
    ("make_batches", partial(Ends(), config=3), WITH_ARGUMENTS + " .config."),
    ("make_batches", Objects, "'x' is an array of object; it must be an array of numbers"),
    ("make_batches", first_batch({}), "a batch must have at least one array"),
    ("make_batches", first_batch({"x": [3]}), "'x/0' must be a numpy array, got int"),
    ("make_batches", first_batch({"x": TOKENS, "y": np.float32(3)}), "'y' must be a numpy array, got float32"),
    (
        "make_batches",
        first_batch({"x": np.zeros(())}),
        "at least one array with rows as its first dim, got scalars only",
    ),
    (
        "make_batches",
        first_batch({"x": np.array(["a"] * ROWS)}),
        "'x' is an array of <U1; it must be an array of numbers",
    ),
    (
        "make_batches",
        first_batch({"x": np.zeros(ROWS, "datetime64[s]")}),
        r"'x' is an array of datetime64\[s\]; it must",
    ),
    ("make_batches", first_batch({"x": TOKENS, "y": np.zeros(3)}), "equal numbers of rows, got 'x' 8, 'y' 3"),
    ("make_batches", first_batch({"x": TOKENS[:4]}), r"data\.batch_size=8 rows, got 4 rows"),
    ("make_batches", first_batch({"x": np.full(ROWS, 2**40)}), "'x' is int64 and must fit int32, got .* 1099511627776"),
    ("eval_fns", {"a/b": numbers({})}, "a name must be text without '/', got 'a/b'"),
    ("eval_fns", {"": numbers({})}, "a name must be text without '/', got ''"),
    ("eval_fns", {"a": 3}, r"eval_fns\['a'\] must be a function, got int"),
    ("eval_fns", {"a": lambda: {}}, rf"eval_fns\['a'\]: .*{WITH_ARGUMENTS} \(config, evaluate\)"),
    ("eval_fns", {"a": numbers(3.0)}, r"eval_fns\['a'\]: .*must return a dict of real numbers, got float"),
    ("eval_fns", {"a": numbers({"b/c": 1})}, "got the name 'b/c'; a name must be text without '/'"),
    ("eval_fns", {"a": numbers({"b": "high"})}, "got 'b' of type str; convert it by float"),
    ("eval_fns", {"a": numbers({"b": np.zeros(3)})}, "got 'b' of type ndarray"),
    ("eval_fns", {"a": lambda config, evaluate: {}["x"]}, rf"eval_fns\['a'\]: .*{PLACE}KeyError: 'x'"),
    ("eval_fns", {"a": evaluated({"inputs": [1]})}, "'inputs/0' must be a numpy array"),
    (
        "eval_fns",
        {"a": evaluated({"inputs": TOKENS[:3], "targets": TOKENS[:3]})},
        r"eval_fns\['a'\]: evaluate\(batch\) of an eval_fn: the batch of 3 rows is not divisible by 2 \(dp=2\)",
    ),
    ("eval_fns", {"a": evaluated({"inputs": TOKENS})}, "KeyError: 'targets'"),
    ("eval_fns", {"a": lambda config, evaluate: mean_metrics(evaluate, [])}, "mean_metrics needs .* there is no batch"),
    (
        "eval_fns",
        {"a": evaluated({"inputs": TOKENS[:4], "targets": TOKENS[:4]})},
        r"eval_fns\['a'\]: .*metrics of loss_fn must be real scalars, but 'ones' is f32\[8\]\. Return their sums",
    ),
    ("eval_fns", {"of": numbers({"loss": 1.0})}, "of/loss is a metric of loss_fn too"),
]


def loss_of_eval_fns(model: Any, batch: Any) -> Any:
    """The metrics are scalars for batches of 8 rows only."""
    loss, weight = bigram.loss_fn(model, batch)
    return loss, weight, {"of": {"loss": loss}} | ({} if len(batch["inputs"]) == ROWS else {"ones": jnp.ones(8)})


def base_of(name: str) -> TrainConfig:
    if name == "eval_fns":
        return replace(bigram.recipe(), make_batches=user_recipe.token_batches, sample=None, loss_fn=loss_of_eval_fns)
    return replace(bigram.recipe(), sample=None, make_batches=user_recipe.token_batches if name == "sample" else None)


@pytest.mark.parametrize(("name", "value", "problem"), FUNCTIONS, ids=[f"{x[0]}-{i}" for i, x in enumerate(FUNCTIONS)])
def test_a_wrong_function_is_one_line_with_its_place_before_the_run_has_a_folder(name, value, problem, tmp_path, text):
    settings = [f"data.source={text}", f"run.folder={tmp_path / 'run'}", "run.steps=3", "run.eval_every=2"]
    config = apply_overrides(replace(base_of(name), **{name: value}), settings)
    with pytest.raises(ConfigError) as caught:
        train(config)
    error = str(caught.value)
    assert len(caught.value.problems) == 1 and error.startswith(name) and ": : " not in error, error
    assert re.search(problem, error), error
    assert problem != "KeyError: 'labels'" or isinstance(caught.value.__cause__, KeyError)
    if callable(value) and name != "sample" and value is not UNKNOWN and "must fit int32" not in error:
        place = re.search(r"test_mistakes\.py, line (\d+): ", error)
        of_class = value if isinstance(value, type) else Ends
        lines, first = inspect.getsourcelines(value if inspect.isfunction(value) else of_class)
        assert place is not None and first <= int(place[1]) < first + len(lines)
    assert not (tmp_path / "run").exists()


def test_a_function_of_optax_is_no_make_optimizer():
    problem = r"^make_optimizer: TypeError: unsupported .*; make_optimizer\(config, parameters\) must return an optax"
    with pytest.raises(ConfigError, match=problem) as caught:
        build_program(replace(bigram.recipe(), make_optimizer=optax.adam))
    assert "\n" not in str(caught.value)


def pipeline_loss_with(metrics: Any) -> Any:
    return lambda model, batch: (*next_token_loss(model, batch)[:2], metrics(jnp.float32(0)))


SIX_ROWS = np.zeros((6, 16), np.int32)
OF_PIPELINES: list[tuple[dict[str, Any], str]] = [
    ({"loss_fn": lambda model, batch: {}["a"]}, rf"^loss_fn: .*{PLACE}KeyError: 'a'"),
    *(
        ({"loss_fn": pipeline_loss_with(metrics)}, rf"^loss_fn: .*{PLACE}metrics of loss_fn {problem}")
        for metrics, problem in ROW_METRICS
    ),
    ({"wrt": ...}, "^wrt=... selects all variables"),
    ({"eval_fns": {"a": evaluated({"inputs": TOKENS})}}, "next_token_loss takes a batch .* got .*inputs.: .i32.4,32"),
    (
        {"eval_fns": {"a": evaluated({"inputs": SIX_ROWS, "targets": SIX_ROWS})}},
        r"6 rows is not divisible by 4 \(dp=2 \* pipeline\.num_microbatches=2\)",
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("functions", "problem"), OF_PIPELINES, ids=range(len(OF_PIPELINES)))
def test_a_wrong_function_of_a_pipeline_is_one_line_too(functions, problem):
    recipe = replace(user_recipe.recipe(), make_batches=user_recipe.token_batches, **functions)
    with pytest.raises(ConfigError, match=problem):
        build_program(apply_overrides(recipe, [*user_recipe.MESHES["pp"], "run.eval_every=2"]))
