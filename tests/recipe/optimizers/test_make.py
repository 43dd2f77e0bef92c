"""Every optimizer by name equals plain optax on one device, a mesh and in a pipeline; layouts of states; averages."""

import difflib
from dataclasses import replace
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import ScheduleFreeState

from flax_mesh import abstract_state, create_mesh
from flax_mesh.checkpoint.read import read_record, read_tree
from flax_mesh.errors import ConfigError
from flax_mesh.inference import open_trained
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.modes import optimizer_of
from flax_mesh.recipe.explain import explain
from flax_mesh.recipe.optimizers.average import average_parameters, with_average
from flax_mesh.recipe.optimizers.check import own_optimizer
from flax_mesh.recipe.optimizers.make import make_optimizer
from flax_mesh.recipe.optimizers.schedule_free import NOT_EVALUATED, with_evaluated
from flax_mesh.recipe.program import build_program
from flax_mesh.train import PipelineConfig, TrainState, apply_overrides, init_train_state, load_recipe
from flax_mesh.train.export import export, read_values
from flax_mesh.train.report import rounding_notes
from flax_mesh.tree import map_named, named_leaves
from tests.golden_text import golden_text
from tests.recipe.optimizers.plain import (
    CLIP,
    CONFIG,
    MODEL,
    PLAIN,
    RATE,
    SETTINGS,
    assert_close,
    average_of,
    config_of,
    host_batch,
    muon,
    parameters,
    plain,
    trained,
)
from tests.train.support.runs import run

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "optimizers"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [*product(PLAIN, ("mesh", "pp")), ("adamw", "sp")])
def test_an_optimizer_by_name_equals_plain_optax(name, mesh):
    settings, make = PLAIN[name]
    expected, losses = plain(optax.chain(CLIP, make()))
    _, state, rows = trained(config_of(mesh, **settings))
    # The rounding of a bfloat16 moment to the other neighbour changes a parameter by its share of the learning rate.
    tolerance = 2e-4 if "bfloat16" in name else 1e-6
    assert_close(parameters(state), expected[-1], tolerance)
    # Sums over devices differ by a few units in the last place of float32.
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=5e-7, abs=tolerance)
    assert [row["learning_rate"] for row in rows] == pytest.approx([float(RATE(step)) for step in range(3)])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["mesh", "pp"])
def test_frozen_parameters_stay_as_they_are_and_have_no_moments(mesh):
    def is_trained(path):
        return "attention/" not in path and not path.startswith("layers/0/")

    expected, _ = plain(optax.chain(CLIP, PLAIN["adamw"][1]()), is_trained)
    program, state, _ = trained(config_of(mesh, groups="attention/ frozen; layers/0/ frozen"))
    assert_close(parameters(state), expected[-1])
    first = parameters(program.init())
    for path, value in parameters(state).items():
        assert (value == first[path]).all() != is_trained(path), path
    moments = [path for path, _ in named_leaves(state.to_nnx()["optimizer"]) if "/mu/" in path]
    assert moments and not [path for path in moments if not is_trained(path.split("/mu/")[1])]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["mesh", "pp"])
def test_an_optimizer_a_schedule_and_a_filter_of_the_recipe(mesh):
    seen = []

    class Scale(nnx.filterlib.OfType):
        """All scales, by a filter that compares as one: it is part of the definition of a state."""

        def __init__(self):
            super().__init__(nnx.Param)

        def __call__(self, path, x):
            return super().__call__(path, x) and path[-1] == "scale"

    def make_optimizer(config, given):
        assert config.optimizer.b1 == 0.7
        seen.append({path: (x.shape, x.dtype) for path, x in named_leaves(given)})
        return optax.lion(make_schedule(config), b1=config.optimizer.b1)

    def make_schedule(config):
        return optax.linear_schedule(config.optimizer.learning_rate, 0.0, 10)

    recipe = replace(CONFIG, make_optimizer=make_optimizer, make_schedule=make_schedule, wrt=Scale())
    by_hand = optax.lion(optax.linear_schedule(0.01, 0.0, 10), b1=0.7)
    expected, losses = plain(by_hand, lambda path: path.endswith("scale"))
    _, state, rows = trained(config_of(mesh, recipe=recipe, b1=0.7))
    assert_close(parameters(state), expected[-1])
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-6)
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.01, 0.009, 0.008])
    shapes = {path: (x.shape, x.dtype) for path, x in parameters(state).items() if path.endswith("scale")}
    assert seen and all(given == shapes for given in seen)
    recipe = replace(CONFIG, make_optimizer=lambda config, given: optax.sgd(0.1))
    assert "learning_rate" not in trained(config_of(mesh, recipe=recipe), steps=1)[2][0], "it is made up"


def one_array() -> optax.GradientTransformation:
    """An optimizer whose state is the number of updates."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda x: -0.1 / (1 + state) * x, updates), state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


def updated_linear(optimizer, num_updates, dtype=None) -> TrainState:
    """The state of a linear layer on two devices after updates by gradients of 1."""

    def make():
        model = nnx.Linear(4, 8, rngs=nnx.Rngs(0), param_dtype=dtype)
        return model, optimizer_of(model, optimizer, nnx.Param)

    mesh = create_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    state = init_train_state(make, abstract_state(make, mesh, "fsdp"))
    for _ in range(num_updates):
        model, own = state.merge()
        own.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
        state = state.replace(model, own)
    return state


def test_an_optimizer_whose_state_is_one_array_is_a_tuple_of_one():
    abstract = nnx.state(nnx.eval_shape(lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0))))
    chosen = own_optimizer(lambda given: one_array(), abstract)
    first, last = (updated_linear(chosen, steps) for steps in (0, 2))
    assert_close(parameters(last), {path: x - 0.15 for path, x in parameters(first).items()})
    assert [float(x) for path, x in named_leaves(last.to_nnx()["optimizer"]) if path == "opt_state/0"] == [2.0]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["mesh", "pp"])
def test_a_recipe_trains_with_an_optimizer_whose_state_is_one_array(mesh):
    expected, _ = plain(one_array())
    _, state, _ = trained(config_of(mesh, recipe=replace(CONFIG, make_optimizer=lambda config, given: one_array())))
    assert_close(parameters(state), expected[-1])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["mesh", "pp"])
def test_muon_on_a_stack_treats_every_layer_as_a_matrix(mesh):
    expected, _ = plain(optax.chain(CLIP, muon()))
    stack = DecoderConfig(**{**vars(MODEL), "scan": True})
    _, state, _ = trained(config_of(mesh, model=stack, name="muon"))
    found = parameters(state)
    for path, value in expected[-1].items():
        if not path.startswith("layers/"):
            continue
        _, layer, rest = path.split("/", 2)
        parts = {p: x for p, x in found.items() if p.startswith(f"layers/{rest}")}
        stacked = jnp.concatenate([parts[p] for p in sorted(parts)])  # one per group of a pipeline
        assert_close({path: stacked[int(layer)]}, {path: value})


@pytest.mark.slow
def test_muon_of_experts_runs_by_expert_on_a_stack_in_a_pipeline():
    kinds = {"num_experts": 2, "experts_per_token": 1}
    results = []
    for mesh, scan in (("one", False), ("pp", True)):
        model = DecoderConfig(**{**vars(MODEL), **kinds, "scan": scan})
        config = replace(config_of(mesh, model=model, name="muon"), pipeline=PipelineConfig(num_microbatches=4))
        results.append([row["loss"] for row in trained(config)[2]])
    assert results[0] == pytest.approx(results[1], abs=1e-5)


# --- layouts of the states ---


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor", "sgd"])
def test_the_layout_of_an_optimizers_state_equals_its_golden_text(name, request):
    settings = [f"optimizer.name={name}", "optimizer.ema=0.99", "optimizer.shard_over=dp", "model.scan=true"]
    config = apply_overrides(load_recipe(str(ROOT / "recipes" / "tiny_moe.py")), [*settings, "mesh.shape=dp:2,fsdp:2,tp:2"])  # fmt: skip # noqa: E501
    explanation = explain(config)
    assert not explanation.findings
    file, text = GOLDEN / f"{name}.txt", golden_text(explanation.report)
    if request.config.getoption("--update-golden"):
        file.write_text(text, encoding="utf-8")
    lines = difflib.unified_diff(file.read_text().splitlines(), text.splitlines(), str(file), "now", lineterm="", n=0)
    assert not (diff := "\n".join(lines)), f"if this is intended: pytest {__file__} --update-golden\n{diff}"


def test_the_momentum_of_bfloat16_parameters_has_the_documented_dtype_and_0_stores_none():
    params = {"kernel": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
    for settings, stored in (
        ({"name": "sgd", "momentum": 0.0}, []),
        ({"name": "adafactor", "momentum": 0.0}, []),
        ({"name": "adafactor"}, []),
        ({"name": "sgd", "momentum": 0.5}, ["bfloat16"]),
        ({"name": "adafactor", "momentum": 0.5}, ["float32"]),
        ({"name": "adafactor", "momentum": 0.5, "moment_dtype": "bfloat16"}, ["bfloat16"]),
    ):
        state = jax.eval_shape(make_optimizer(replace(SETTINGS, **settings)).init, params)
        momenta = [x.dtype.name for path, x in named_leaves(state) if path.endswith(("trace/kernel", "ema/kernel"))]
        assert momenta == stored, settings


def test_a_run_says_which_steps_half_precision_parameters_lose():
    """As the arithmetic of the dtype: with b2 = 0.999 the second moment of 3,000 gradients of 1 is 0.5, not 0.95."""
    for dtype, lost in ((jnp.bfloat16, 512), (jnp.float16, 4096)):
        one = jnp.ones((), dtype)
        assert one - one * 0.9 / lost == one > one - one * 2.1 / lost
        keys = [jax.ShapeDtypeStruct((), jax.random.key(0).dtype), jax.ShapeDtypeStruct((4,), "float32")]
        (note,) = rounding_notes([jax.ShapeDtypeStruct((3, 2), dtype), *keys], None)
        assert note.startswith(f"6 parameters are stored in {one.dtype}: ") and f"less than 1/{lost} of" in note
    assert rounding_notes(keys, SETTINGS) == []
    settings, moments = replace(SETTINGS, name="adamw", weight_decay=0.0), []
    kernel = jnp.ones(2, jnp.bfloat16)
    for b2 in (0.95, 0.999):
        optimizer = optax.scale_by_adam(b2=b2)
        step = lambda state, _, update=optimizer.update: (update(kernel, state)[1], None)  # noqa: E731
        moments.append(optax.tree.get(jax.lax.scan(step, optimizer.init(kernel), length=3000)[0], "nu")[0])
        (note,) = rounding_notes([kernel], replace(settings, b2=b2))
        assert ("(optimizer.b2=0.999)" in note) == (b2 == 0.999)
    assert moments[0] > 0.96 and moments[1] == 0.5  # exactly: 1.00 and 0.95


# --- the moving average of the parameters ---


DECAY = 0.7


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["mesh", "pp"])
def test_the_average_equals_optax_over_the_history(mesh):
    history, _ = plain(optax.chain(CLIP, PLAIN["adamw"][1]()))
    _, state, _ = trained(config_of(mesh, ema=DECAY))
    averaged = with_average(state, DECAY)
    assert_close(parameters(averaged), average_of(history, DECAY))
    assert_close(parameters(state), history[-1])
    with pytest.raises(AssertionError):
        assert_close(parameters(averaged), history[-1])
    for (path, new), (_, old) in zip(named_leaves(averaged.to_nnx()), named_leaves(state.to_nnx()), strict=True):
        assert new.sharding == old.sharding and new.dtype == old.dtype, path


def test_before_the_first_step_the_average_is_the_parameters():
    first = updated_linear(optax.chain(optax.sgd(0.1), average_parameters(DECAY)), 0)
    assert with_average(first, DECAY) is first


@pytest.mark.slow
def test_the_average_of_half_precision_parameters_is_in_float32():
    model = replace(MODEL, param_dtype="bfloat16")
    _, state, _ = trained(config_of("mesh", model=model, ema=0.999), steps=1)
    leaves = {path: x.dtype for path, x in named_leaves(state.to_nnx()["optimizer"]) if "/average/" in path}
    assert leaves and set(leaves.values()) == {jnp.dtype("float32")}
    assert {x.dtype for x in parameters(with_average(state, 0.999)).values()} == {jnp.dtype("bfloat16")}


# --- schedule-free optimizers ---


def by_kernels(optimizer):
    def label(path, _):
        return "free" if path.endswith("kernel") else "rest"

    return optax.partition({"free": optimizer, "rest": optax.sgd(0.1)}, lambda params: map_named(label, params))


WRAPPERS = {"alone": lambda one: one, "chain": lambda one: optax.chain(CLIP, one), "partition": by_kernels}


def schedule_free(wrap, dtype=None):
    return WRAPPERS[wrap](optax.contrib.schedule_free_sgd(0.5, b1=0.8, state_dtype=dtype))


def recipe_of(wrap, dtype=None):
    return replace(CONFIG, make_optimizer=lambda config, parameters: schedule_free(wrap, dtype))


@pytest.mark.parametrize(("wrap", "dtype"), [("partition", None), ("chain", None), ("alone", "bfloat16")])
def test_a_schedule_free_optimizer_is_evaluated_at_the_parameters_of_optax(wrap, dtype):
    state = updated_linear(schedule_free(wrap, dtype and "float32"), 2, dtype)
    assert_evaluated_as_optax(state, with_evaluated(state), "kernel" if wrap == "partition" else "")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["mesh", "pp"])
def test_a_recipe_evaluates_its_schedule_free_optimizer(mesh):
    program, state, _ = trained(config_of(mesh, recipe=recipe_of("partition")))
    assert_evaluated_as_optax(state, program.recipe.optimizer.evaluated(state), "kernel")


def assert_evaluated_as_optax(state, evaluated, trained_by):
    """The parameters whose paths end with `trained_by` differ from `state`, and equal the result of optax."""
    found, before = parameters(evaluated), parameters(state)
    pure = nnx.as_pure(state.merge()[1].opt_state)
    states = jax.tree.leaves(pure, is_leaf=lambda x: isinstance(x, ScheduleFreeState))
    (free,) = (jax.tree.map(np.asarray, x) for x in states if isinstance(x, ScheduleFreeState))
    z = dict(named_leaves(free.z))
    assert z.keys() == {path for path in before if path.endswith(trained_by)}
    expected = optax.contrib.schedule_free_eval_params(free._replace(z=z), {path: before[path] for path in z})
    for path, value in before.items():
        wanted = jnp.asarray(expected[path]).astype(value.dtype) if path in z else value
        np.testing.assert_allclose(found[path].astype("f4"), wanted.astype("f4"), rtol=1e-6, atol=1e-6, err_msg=path)
        assert (found[path] != value).any() == (path in z) and found[path].dtype == value.dtype, path


def test_a_schedule_free_optimizer_with_another_average_is_refused():
    with pytest.raises(ConfigError, match=r"^optimizer.ema=0.7 must be 0 with a schedule-free optimizer"):
        build_program(config_of("one", recipe=recipe_of("chain"), ema=DECAY))


@pytest.mark.slow
def test_a_schedule_free_run_evaluates_as_optax_and_describes_its_exports(tmp_path, text):
    def eval_fn(config, evaluate):
        sums = evaluate(host_batch(7))
        return {"loss": sums["loss"] / sums["weight"]}

    config = replace(run_config(tmp_path, text, ema=0.0), make_optimizer=recipe_of("chain").make_optimizer)
    row = run(replace(config, eval_fns={"own": eval_fn})).rows[-1]
    step = tmp_path / "run" / "checkpoints" / "4"
    values = dict(read_values(step, read_tree(step, read_record(step))))
    graphdef, model = nnx.split(make_decoder(config.model, nnx.Rngs(0)))
    start = "optimizer/opt_state/1/"
    z = {path: values[f"{start}z/{path}"] for path, _ in named_leaves(model)}
    free = ScheduleFreeState(values[f"{start}b1"], 0.0, 1, 0.0, (), z)
    batch, losses = jax.tree.map(jnp.asarray, host_batch(7)), []
    training = {path: values[f"model/{path}"] for path in z}
    for used in (optax.contrib.schedule_free_eval_params(free, training), training):
        leaves = [jnp.asarray(used[path]) for path, _ in named_leaves(model)]
        merged = nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(model), leaves))
        loss, weight = next_token_loss(merged, batch)[:2]
        losses.append(float(loss / weight))
    assert row["own/loss"] == pytest.approx(losses[0], abs=1e-5) and abs(losses[0] - losses[1]) > 1e-3
    written = export(str(tmp_path / "run"), str(tmp_path / "out"), "orbax", None, None)
    assert written["notes"] == [f"note: these are {NOT_EVALUATED}"]
    assert open_trained(tmp_path / "run", ["mesh.shape=fsdp:1"]).description.endswith(f"step 4, {NOT_EVALUATED}")


# --- runs ---


def run_config(folder, text, *settings, ema=DECAY, steps=4):
    config = replace(config_of("mesh", ema=ema), model=replace(MODEL, vocab_size=256))
    more = [f"data.source={text}", "data.held_out=0.3", "data.eval_batches=2", "checkpoint.every=2", "run.eval_every=4"]
    more += [f"run.steps={steps}", f"run.folder={folder / 'run'}", "run.sample_tokens=0"]
    return apply_overrides(config, [*more, *settings])


@pytest.mark.slow
def test_another_decay_is_refused_on_resume(tmp_path, text):
    """Also with --allow-changes, which accepts other changes: the stored average is divided by 1 - decay^steps."""
    run(run_config(tmp_path, text, steps=2))
    for allow_changes, changed in ((False, 2), (True, 1)):
        with pytest.raises(ConfigError, match=r"optimizer.ema: 0.7 -> 0.8 \(changes the result\)") as refused:
            run(run_config(tmp_path, text, "optimizer.b1=0.8", ema=0.8), allow_changes=allow_changes)
        _, *changes, repair = refused.value.lines
        assert len(changes) == changed and "start a new run" in repair and "needs one decay for all" in repair
