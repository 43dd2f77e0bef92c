"""Models of many styles in every mode of NNX: initialized, trained, pipelined and saved as on one device."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_mesh as fm
from flax_mesh import create_mesh
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.layout import is_key
from flax_mesh.errors import ShardingError
from flax_mesh.mpmd import MpmdMesh, Pipeline, split_stages
from flax_mesh.step.state import TrainState, abstract_train_state
from flax_mesh.step.step import make_eval_step
from flax_mesh.train import init_train_state, make_train_step
from tests.mpmd.zoo.base import FAST
from tests.step.modes import (
    LAYERS,
    MICROBATCHES,
    MODES,
    OPTIMIZER,
    STEPS,
    STYLES,
    Listed,
    PytreeModel,
    TiedVariable,
    Trajectory,
    assert_equal,
    batch,
    leaves_of,
    loss_fn,
    make_both,
    reference,
)

pytestmark = [
    pytest.mark.usefixtures("quick_unless_slow"),
    pytest.mark.filterwarnings("ignore:rules=.fsdp."),  # tp has no work here
]
# The rest of the matrix is slow.
ALWAYS = {(style, "tree") for style in ("scanned", "tied_variable", "pytree", "linen")}
ALWAYS |= {("tied_variable", "hijax_ref"), ("annotated", "eager_sharding")}
MATRIX = [
    pytest.param(style, mode, marks=() if (style, mode) in ALWAYS else pytest.mark.slow)
    for style in STYLES
    for mode in MODES
]


GROUPS = MpmdMesh(create_mesh((2, 2), ("pp", "fsdp"), devices=jax.devices()[:4]), "pp")
STEP: dict[str, Any] = {"num_microbatches": MICROBATCHES, "compiler_options": FAST}
SPLIT: dict[str, Any] = {"num_microbatches": MICROBATCHES, "schedule": "1f1b"}


@pytest.fixture(scope="module")
def mesh():
    return create_mesh((2, 2), ("fsdp", "tp"), devices=jax.devices()[:4])


def layers_of(style: str) -> str:
    return LAYERS.get(style, "layers")


def rules_of(style: str) -> fm.PartitionRules | None:
    return None if style == "annotated" else fm.PartitionRules("fsdp", layers=layers_of(style))


def train(state: TrainState, step, rows=None) -> Trajectory:
    losses, leaves, shardings = [], [], [x.sharding for x in state.leaves]
    for _ in range(STEPS):
        state, metrics = step(state, batch() if rows is None else rows)
        assert [x.sharding for x in state.leaves] == shardings
        losses.append(float(metrics["loss"]))
        leaves.append(leaves_of(state.to_nnx()["model"]))
    return losses, leaves


@pytest.mark.sampled
@pytest.mark.parametrize(("style", "mode"), MATRIX)
def test_a_train_step_equals_plain_jax_on_one_device(style, mode, mesh):
    """Also statistics of a batch whose rows are split."""
    expected, rows = reference(style), jax.device_put(batch(), NamedSharding(mesh, P("fsdp")))
    with MODES[mode]():
        make = lambda: make_both(style)  # noqa: E731
        state = init_train_state(make, fm.abstract_state(make, mesh, rules_of(style)))
        step = make_train_step(loss_fn, state, layers=layers_of(style), **STEP)
        assert_equal(train(state, step, rows), expected)


@pytest.mark.sampled
@pytest.mark.parametrize(("style", "mode"), MATRIX)
def test_a_pipeline_equals_plain_jax_on_one_device(style, mode):
    expected = reference(style)
    with MODES[mode]():
        staged = split_stages(loss_fn, STYLES[style], batch(), mesh=GROUPS, layers=layers_of(style), **SPLIT)
        pipeline = Pipeline(staged, OPTIMIZER, rules=rules_of(style), compiler_options=FAST)
        assert_equal(train(pipeline.init_state(), pipeline.step), expected)


def random_array(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    rng = np.random.default_rng(0)
    value = jax.random.key(7) if is_key(leaf) else rng.normal(size=leaf.shape, scale=9).astype(leaf.dtype)
    return jax.device_put(value, leaf.sharding)


@pytest.mark.parametrize(
    ("style", "saved_in", "restored_in"),
    [
        ("scanned", "tree", "graph"),
        ("tied_variable", "hijax", "tree"),
        ("pytree", "graph", "hijax_ref"),
        ("attributes", "tree", "ref"),
        ("linen", "no_eager_sharding", "tree"),
    ],
)
def test_a_checkpoint_of_one_mode_restores_in_another(style, saved_in, restored_in, mesh, tmp_path):
    make = lambda: make_both(style)  # noqa: E731
    layers = layers_of(style)
    with MODES[saved_in](), Checkpointer(tmp_path, layers=layers) as checkpointer:
        abstract = abstract_train_state(make, fm.abstract_state(make, mesh, rules_of(style)))
        state = TrainState(tuple(map(random_array, abstract.leaves)), abstract.definition)
        checkpointer.save(1, state)
    other = create_mesh((1, 4), ("fsdp", "tp"), devices=jax.devices()[4:])
    with MODES[restored_in](), Checkpointer(tmp_path, layers=layers) as checkpointer:
        layout = abstract_train_state(make, fm.abstract_state(make, other, rules_of(style)))
        restored = checkpointer.restore(layout)
        model, optimizer = restored.merge()
    for x, y in zip(state.leaves, restored.leaves, strict=True):
        assert y.sharding.mesh == other
        x, y = (jax.random.key_data(x), jax.random.key_data(y)) if is_key(x) else (x, y)
        np.testing.assert_array_equal(np.array(x), np.array(y))
    assert type(model) is STYLES[style] and isinstance(optimizer, nnx.Optimizer)
    assert {type(x) for _, x in nnx.iter_graph(model) if isinstance(x, nnx.Param)} == {nnx.Param}


class Noisy(Listed):
    def __init__(self):
        super().__init__()
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(5))

    def __call__(self, x):
        return super().__call__(self.dropout(x))


def test_random_streams_are_equal_in_all_modes(mesh):
    programs, make = set(), lambda: (model := Noisy(), nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param))
    for name in ("graph", "tree", "hijax_ref"):
        with MODES[name]():
            layout = abstract_train_state(make, fm.abstract_state(make, mesh, "fsdp"))
            programs.add(str(make_train_step(loss_fn, layout).trace(layout, batch()).jaxpr))
    assert len(programs) == 1 and "random_bits" in programs.pop()


def test_a_step_continues_in_another_mode(mesh):
    """State and step are made in graph mode; the step is traced in tree mode."""
    make = lambda: make_both("tied_variable")  # noqa: E731
    layout = abstract_train_state(make, fm.abstract_state(make, mesh, "fsdp"))
    programs = set()
    for mode in ("graph", "tree"):
        step = make_train_step(loss_fn, layout, **STEP)
        with MODES[mode]():
            programs.add(str(step.trace(layout, batch()).jaxpr))
    assert len(programs) == 1


@pytest.mark.parametrize("mode", ["graph", "tree"])
def test_an_evaluation_calls_eval_of_the_modules_in_a_pytree(mode, mesh):
    """With BatchNorm in eval mode, rows do not depend on each other and statistics do not change."""
    with MODES[mode]():
        make = lambda: make_both("pytree")  # noqa: E731
        state = init_train_state(make, fm.abstract_state(make, mesh, "fsdp"))
        sums = make_eval_step(loss_fn, state)(state, batch())
    model = PytreeModel()
    for layer in model.layers:
        layer.norm.eval()
    np.testing.assert_allclose(sums["loss"], loss_fn(model, batch())[0], rtol=1e-5)


@pytest.mark.parametrize("mode", ["hijax", "ref"])
def test_explicit_hijax_variables_are_refused_before_anything_compiles(mode, mesh, compilations):
    class Explicit(Listed):
        def __init__(self):
            super().__init__()
            self.scale = nnx.Param(np.ones((), np.float32), **{mode: True})

    with pytest.raises(ShardingError, match=f"(?s)these were created with {mode}=True.*nnx.with_vars.*scale: {mode}"):
        fm.abstract_state(Explicit, mesh, "fsdp")
    with pytest.raises(ShardingError, match="Variables must contain arrays"):
        split_stages(loss_fn, Explicit, batch(), num_stages=2)
    assert not compilations


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["hijax", "ref", "hijax_ref"])
def test_a_model_of_hijax_variables_is_refused_and_with_vars_converts_it(mode, mesh):
    with MODES[mode]():
        model = TiedVariable()
    with pytest.raises(ShardingError, match=r"Variables must contain arrays.*nnx\.with_vars"):
        fm.abstract_state(lambda: model, mesh, "fsdp")
    with pytest.raises(ShardingError, match="Variables must contain arrays"):
        fm.match_partition_rules([(".*", ())], nnx.state(model))
    converted = nnx.with_vars(model, hijax=False, ref=False, allow_duplicates=True)
    assert converted.last.kernel is converted.first.kernel
    fm.abstract_state(lambda: converted, mesh, "fsdp")
    split_stages(loss_fn, converted, batch(), num_stages=2)


def test_an_nnx_call_that_refuses_shared_variables_is_named_in_one_line(mesh):
    make = lambda: (model := TiedVariable(), nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param))  # noqa: E731
    found = r"^first[./]kernel and last[./]kernel are one Variable, .* tree mode \(graph=False\).* pass graph=True"
    with MODES["tree"](), pytest.raises(ShardingError, match=found):
        fm.abstract_state(make, mesh, "fsdp")
    with MODES["tree"](), pytest.raises(ShardingError, match=found):
        split_stages(lambda model, batch: len(nnx.split(model)), TiedVariable, batch(), num_stages=2)


def test_rules_that_split_the_layers_of_a_stage_are_refused():
    staged = split_stages(loss_fn, STYLES["scanned"], batch(), mesh=GROUPS, layers="layers", **SPLIT)
    with pytest.raises(ShardingError, match=r"layers/calls: .*1 layers of a stage into 2 parts\n.*layers=\.\.\."):
        Pipeline(staged, OPTIMIZER, rules="fsdp")


RULES = [("kernel", P("fsdp", "tp")), (".*", ())]


@pytest.mark.parametrize("mode", ["graph", "tree", "no_eager_sharding"])
@pytest.mark.parametrize("kind", [nnx.Optimizer, nnx.ModelAndOptimizer])
def test_optimizer_states_are_sharded_and_saved_and_filtered_states_sharded(kind, mode, mesh, tmp_path):
    with MODES[mode]():
        model = Listed()
        optimizer = kind(model, optax.adam(1e-2), wrt=nnx.Param)
        state = nnx.state(optimizer)
        specs = fm.match_partition_rules(RULES, state)
        shard, gather = fm.make_shard_and_gather_fns(specs, mesh)
        sharded = jax.tree.map(lambda fn, x: fn(x), shard, state)
        with Checkpointer(tmp_path, layers="layers") as checkpointer:
            checkpointer.save(1, sharded)
            restored = checkpointer.restore(sharded)
        nnx.update(optimizer, jax.tree.map(lambda fn, x: fn(x), gather, restored))
        for part in nnx.state(model, nnx.Param, ...):  # a filtered state
            shard, _ = fm.make_shard_and_gather_fns(fm.match_partition_rules(RULES, part), mesh)
            assert leaves_of(jax.tree.map(lambda fn, x: fn(x), shard, part)).keys() == leaves_of(part).keys()
    assert restored["opt_state"][0]["mu"]["first"]["kernel"].get_value().sharding.spec == P("fsdp", "tp")
    for path, value in leaves_of(nnx.state(optimizer)).items():
        np.testing.assert_array_equal(value, leaves_of(state)[path], err_msg=path)
