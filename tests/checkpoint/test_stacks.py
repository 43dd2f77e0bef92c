"""Stacks of layers are named by the model's table or by an argument; a stack that neither names is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh import ConfigError, abstract_state, create_mesh, partitioned
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.models import make_decoder
from flax_mesh.train import TrainState, abstract_train_state
from tests.checkpoint.states import SMALL, check_leaves, check_same, pipelined, random_values

pytestmark = pytest.mark.usefixtures("quick_compilation")


def stack(make, size):
    """`size` layers `make(key)` in one module, whose arrays have one dim more."""
    return nnx.vmap(make)(jax.random.split(jax.random.key(0), size))


class Block(nnx.Module):
    """Flax layers, a parameter outside of them and a random stream."""

    def __init__(self, key):
        rngs = nnx.Rngs(key)
        self.norm, self.drop = nnx.RMSNorm(8, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.mlp = nnx.Dict(up=nnx.Linear(8, 16, rngs=rngs), down=nnx.Linear(16, 8, use_bias=False, rngs=rngs))
        self.gate = nnx.Param(jnp.ones(8))


class Net(nnx.Module):
    def __init__(self, layers):
        self.embed, self.layers = nnx.Embed(4, 8, rngs=nnx.Rngs(0)), layers
        self.norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0))


class TwoStacks(nnx.Module):
    def __init__(self):
        self.encoder = nnx.Dict(layers=stack(Block, 2), place=nnx.Param(jnp.ones((2, 8))))  # as long as its layers
        self.decoder = nnx.Dict(layers=stack(Block, 3), norm=nnx.LayerNorm(8, rngs=nnx.Rngs(0)))


def named(kind, *layers):
    """A subclass whose table names these layers."""
    return partitioned([(".*", ())], layers=layers)(type("Named", (kind,), {}))


BOTH = ["encoder/layers", "decoder/layers"]


def scanned(kind=Net):
    return kind(stack(Block, 3))


def listed(kind=Net):
    return kind(nnx.List([Block(jax.random.key(0)) for _ in range(3)]))


def train_state(make, optimizer=None) -> TrainState:
    def both():
        model = make()
        return model, nnx.Optimizer(model, optimizer or optax.adam(1e-3), wrt=nnx.Param)

    mesh = create_mesh((1,) * 5, devices=jax.devices()[:1])
    return random_values(abstract_train_state(both, abstract_state(both, mesh, [(".*", ())])))


def save(folder, state, **kinds) -> list[str]:
    """Paths on disk."""
    with Checkpointer(folder, **kinds) as checkpointer:
        checkpointer.save(1, state, {})
        checkpointer.wait()
        return list(checkpointer.arrays(1))


def refused(folder, state, **kinds) -> list[str]:
    with Checkpointer(folder, **kinds) as checkpointer, pytest.raises(ConfigError) as error:
        checkpointer.save(1, state, {})
    assert not folder.exists()  # nothing was written
    assert error.value.head.endswith("; nothing was written:")
    return error.value.lines[1:]


def check_restored(checkpointer, state) -> None:
    restored, (again, report) = checkpointer.restore(state), checkpointer.restore_partial(state)
    assert not report.unchanged
    if isinstance(state, TrainState):
        assert restored.definition is again.definition is state.definition
    check_leaves(state, restored, again)


def test_an_unnamed_stack_is_refused_and_a_named_one_is_saved_as_a_list(tmp_path):
    state, as_list = train_state(scanned), train_state(listed)
    assert refused(tmp_path / "a", state) == [
        "  layers/drop/rngs/count: u32[3]",
        "  layers/drop/rngs/key: key<fry>[3]",
        "  layers/gate: f32[3,8]",
        "  layers/mlp/down/kernel: f32[3,16,8]",
        "  layers/mlp/up/bias: f32[3,16]",
        "  layers/mlp/up/kernel: f32[3,8,16]",
        "  layers/norm/scale: f32[3,8]",
        "  Name the stacks: pass layers=['layers'] to Checkpointer, or to @partitioned of the model's class.",
    ]
    advice = "  Name the stacks: pass layers=['other', 'layers'] to Checkpointer"
    assert refused(tmp_path / "a", state, layers=["other"])[-1].startswith(advice)
    alone = Net(stack(lambda key: nnx.Dict(up=nnx.Linear(8, 8, rngs=nnx.Rngs(key))), 3))
    convolutions = nnx.Dict(layers=stack(lambda key: nnx.Conv(3, 3, (3, 3), rngs=nnx.Rngs(key)), 2))
    for model in (alone, convolutions):  # recognized by the rank of the kernel
        problems = refused(tmp_path / "a", train_state(lambda model=model: model))
        assert len(problems) == 3 and problems[-1].startswith("  Name the stacks: pass layers=['layers'] to")
    assert sorted(save(tmp_path / "b", state, layers="layers")) == sorted(save(tmp_path / "c", as_list))
    with Checkpointer(tmp_path / "b") as checkpointer:
        checkpointer.restore(as_list)


def test_the_table_of_the_model_names_its_layers(tmp_path):
    state = train_state(lambda: scanned(named(Net, "layers")))
    assert [path for path in save(tmp_path, state) if path.startswith("model/layers/1/")]
    with Checkpointer(tmp_path) as checkpointer:
        check_restored(checkpointer, state)


def test_an_argument_overrides_the_table(tmp_path):
    half, both = (train_state(named(TwoStacks, *names)) for names in (BOTH[:1], BOTH))
    problems = refused(tmp_path / "a", half)
    assert problems[-1].startswith(f"  Name the stacks: pass layers={BOTH} to Checkpointer")
    assert len(problems) == 8 and all(line.startswith("  decoder/layers/") for line in problems[:-1])
    assert len(refused(tmp_path / "a", both, layers=())) == 16
    want = save(tmp_path / "b", both)
    assert "model/decoder/layers/2/mlp/up/kernel" in want
    assert save(tmp_path / "c", half, layers=BOTH) == want


def experts():
    stacked = stack(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)), 4)
    return nnx.Dict(experts=stacked, norm=nnx.RMSNorm(8, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    "make",
    [
        listed,
        lambda: Net(nnx.List([experts() for _ in range(2)])),
        lambda: stack(lambda key: nnx.Dict(a=Block(key), b=Block(key)), 3),
        lambda: nnx.Dict(conv=nnx.Conv(3, 8, (3, 3), rngs=nnx.Rngs(0)), norm=nnx.BatchNorm(8, rngs=nnx.Rngs(0))),
    ],
    ids=["a list", "experts in a list", "an ensemble", "a convolution"],
)
def test_models_without_unnamed_stacks_are_saved(make, tmp_path):
    assert save(tmp_path, train_state(make))


def test_the_chunks_of_a_pipelined_stack_must_be_named(tmp_path):
    config = dataclasses.replace(SMALL, num_layers=4, scan=True)
    state = random_values(pipelined(config))
    listed = train_state(lambda: make_decoder(dataclasses.replace(config, scan=False), nnx.Rngs(0)))
    problems = refused(tmp_path / "a", state.to_nnx())  # the model is unknown here
    assert "  layers/attention/q/kernel/from 2: f32[2,16,4,4]" in problems
    assert problems[-1].startswith("  Name the stacks: pass layers=['layers'] to Checkpointer")
    assert refused(tmp_path / "a", state, layers=()) == problems
    of_pipeline, of_list = (save(tmp_path / name, tree) for name, tree in (("b", state), ("c", listed)))
    assert {path for path in of_pipeline if "model/" in path} == {path for path in of_list if "model/" in path}


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["", "local,global", "local:2,global"])
def test_a_pipelined_stack_is_saved_as_a_list_and_restored_as_one(pattern, tmp_path):
    config = dataclasses.replace(SMALL, num_layers=4, layer_pattern=pattern, sliding_window=5)
    make = lambda: make_decoder(config, nnx.Rngs(0))  # noqa: E731
    of_list = train_state(make, optax.sgd(1e-3))
    of_pipeline = random_values(pipelined(dataclasses.replace(config, scan=True)))
    save(tmp_path, of_pipeline)
    with Checkpointer(tmp_path) as checkpointer:
        check_same(checkpointer.restore(of_list), of_pipeline)
        check_restored(checkpointer, of_pipeline)


@pytest.mark.slow
def test_named_modules_that_are_no_stack_are_saved_as_they_are(tmp_path):
    names = ("embed", "norm", "layers")  # all arrays of `norm` have the same leading size, as in a stack
    state = train_state(scanned)
    want = save(tmp_path / "a", state, layers="layers")
    assert "model/norm/scale" in want and "model/layers/2/gate" in want
    assert save(tmp_path / "b", state, layers=names) == want
    assert save(tmp_path / "c", train_state(lambda: scanned(named(Net, *names)))) == want
    for layers in ("layers", names):
        with Checkpointer(tmp_path / "b", layers=layers) as checkpointer:
            for tree in (state, state.to_nnx()):  # an nnx.State does not show that `norm` is one layer
                check_restored(checkpointer, tree)


def test_a_tree_of_arrays_with_several_sizes_is_no_stack(tmp_path):
    tree = {"inc": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}, "layers": {"kernel": jnp.ones((2, 4))}}
    paths = save(tmp_path, tree, layers=("inc", "layers"))
    assert sorted(paths) == ["inc/bias", "inc/kernel", "layers/0/kernel", "layers/1/kernel"]


def test_checkpoints_in_which_a_single_layer_was_cut_are_restored(tmp_path):
    """Before, every module that `layers` names was saved by its first dim."""
    kernel, bias = jnp.arange(12.0).reshape(3, 4), jnp.arange(4.0)
    cut = {str(i): {"kernel": kernel[i], "bias": bias[i]} if i < 3 else {"bias": bias[i]} for i in range(4)}
    save(tmp_path, {"inc": cut})
    single = {"inc": {"kernel": kernel, "bias": bias}}
    with Checkpointer(tmp_path, layers="inc") as checkpointer:
        for restored in (checkpointer.restore(single), checkpointer.restore_partial(single)[0]):
            jax.tree.map(np.testing.assert_array_equal, restored, single)
