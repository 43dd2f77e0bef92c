"""Partial restores: parameters alone, subtrees, other dtypes, other models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh import abstract_state, create_mesh, named_leaves
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.layout import is_key
from flax_mesh.errors import ConfigError
from tests.checkpoint.states import check_leaves, random_values

RULES = [("layers/kernel$", (None, "embed", "mlp")), ("kernel", ("embed", "mlp")), (".*", ())]


class Net(nnx.Module):
    def __init__(self, width: int, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Linear(8, width, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(layers)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


class Scanned(Net):
    """`Net` with its layers in one stack."""

    def __init__(self, width: int, layers: int, rngs: nnx.Rngs):
        super().__init__(width, 0, rngs)
        stack = nnx.vmap(lambda rngs: nnx.Linear(width, width, rngs=rngs), axis_size=layers)
        self.layers = nnx.split_rngs(splits=layers)(stack)(rngs)


@dataclasses.dataclass(frozen=True)
class Make:
    kind: type = Net
    width: int = 16
    layers: int = 2
    seed: int = 0

    def __call__(self):
        model = self.kind(self.width, self.layers, nnx.Rngs(self.seed))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def abstract_of(make: Make):
    return abstract_state(make, create_mesh((1, 4, 1, 2, 1)), RULES)


def state_of(make: Make):
    """Random values, which differ from seed to seed."""
    move = lambda x: jax.device_put(np.asarray(x) + make.seed, x.sharding) if x.dtype == jnp.float32 else x  # noqa: E731
    return jax.tree.map(move, random_values(abstract_of(make)))


@pytest.fixture(scope="module")
def state():
    return state_of(Make())


@pytest.fixture(scope="module")
def checkpointer(state, tmp_path_factory):
    with Checkpointer(tmp_path_factory.mktemp("saved"), layers=["layers"]) as checkpointer:
        checkpointer.save(1, state, {})
        checkpointer.wait()
        yield checkpointer


def values(tree) -> dict[str, np.ndarray]:
    return {path: np.asarray(jax.random.key_data(x) if is_key(x) else x) for path, x in named_leaves(tree)}


def with_dtype(abstract, dtype):
    """`abstract` with its float arrays in another dtype."""
    return jax.tree.map(
        lambda x: x if x.dtype != jnp.float32 else jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), abstract
    )


def test_include_selects_the_parameters_or_a_subtree(checkpointer, state):
    abstract = {"model": abstract_of(Make())["model"]}
    check_leaves({"model": state["model"]}, checkpointer.restore(abstract, include="model/"))
    with pytest.raises(ConfigError, match=r"optimizer/step: only in the checkpoint"):
        checkpointer.restore(abstract)
    layer, want = ({"model": {"layers": {1: tree["model"]["layers"][1]}}} for tree in (abstract, state))
    check_leaves(want, checkpointer.restore(layer, include=r"model/layers/1/"))


def test_cast_allows_another_float_dtype(checkpointer, state):
    abstract = with_dtype(abstract_of(Make()), jnp.bfloat16)
    with pytest.raises(ConfigError, match=r"model/embed/bias: checkpoint f32\[16\], model bf16\[16\]"):
        checkpointer.restore(abstract)
    got = values(checkpointer.restore(abstract, cast=True))
    assert got["model/embed/kernel"].dtype == jnp.bfloat16
    for path, want in values(state).items():
        if want.dtype == np.float32:
            want = want.astype(jnp.bfloat16)
        assert got[path].dtype == want.dtype and np.array_equal(got[path], want), path
    with pytest.raises(ConfigError, match=r"embed/bias: checkpoint f32\[16\], model i32\[16\]"):
        checkpointer.restore(with_dtype(abstract_of(Make()), jnp.int32), cast=True)  # floats stay floats


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [Net, Scanned])
def test_a_partial_restore_reports_what_it_restored(kind, checkpointer, state):
    """Two saved layers, a model with three: a list restores two of them, a stack none."""
    other = state_of(Make(kind, layers=3, seed=1))
    before = values(other)
    got, report = checkpointer.restore_partial(other, include="model/")
    found, saved = values(got), values(state)
    assert np.array_equal(found["model/embed/kernel"], saved["model/embed/kernel"])
    assert set(report.restored) >= {"model/embed/kernel", "model/embed/bias", "model/dropout/rngs/key"}
    assert report.unchanged["model/layers/2/kernel"] == "not in the checkpoint"
    counts = f"{len(report.restored)} arrays, {len(report.unchanged)} unchanged, 0 unused"
    assert str(report).startswith(f"restored {counts}")
    if kind is Net:
        assert np.array_equal(found["model/layers/1/kernel"], saved["model/layers/1/kernel"])
        assert np.array_equal(found["model/layers/2/kernel"], before["model/layers/2/kernel"])
        assert "model/layers/1/kernel" in report.restored
    else:
        assert np.array_equal(found["model/layers/kernel"], before["model/layers/kernel"])
        assert report.unchanged["model/layers/0/kernel"] == "model/layers/2/kernel of the same stack is unchanged"
    assert all(np.array_equal(found[path], before[path]) for path in before if path.startswith("optimizer/"))


def test_a_partial_restore_stacks_layers_and_reports_unused_arrays(checkpointer, state):
    other = state_of(Make(Scanned, seed=1))
    got, report = checkpointer.restore_partial(other, include="model/layers/")
    stack = values(got)["model/layers/kernel"]
    want = [values(state)[f"model/layers/{i}/kernel"] for i in range(2)]
    assert np.array_equal(stack, np.stack(want)) and not report.unchanged and not report.unused
    assert np.array_equal(values(got)["model/embed/kernel"], values(other)["model/embed/kernel"])
    narrow = state_of(Make(width=32, layers=1, seed=1))
    _, report = checkpointer.restore_partial(narrow, include="model/")
    assert report.unchanged["model/embed/kernel"] == "checkpoint f32[8,16], state f32[8,32]"
    assert set(report.unused) == {"model/layers/1/kernel", "model/layers/1/bias"}
    assert "  unused model/layers/1/bias" in str(report)


def test_a_partial_restore_of_nothing_is_an_error(checkpointer):
    other = state_of(Make(width=32, layers=1))
    with pytest.raises(ConfigError, match=r"no array of the checkpoint matches .*\n  model/embed/kernel: checkpoint"):
        checkpointer.restore_partial(other, include="model/embed/kernel")
    with pytest.raises(ConfigError, match="no path starts with 'encoder/'"):
        checkpointer.restore_partial(other, include="encoder/")


def test_a_stack_is_unchanged_if_only_some_of_its_layers_are_included(checkpointer):
    scanned = state_of(Make(Scanned, seed=1))
    got, report = checkpointer.restore_partial(scanned, include="model/(embed|layers/1)/")
    before, after = values(scanned), values(got)
    changed = {path for path in before if not np.array_equal(before[path], after[path])}
    assert changed == {"model/embed/kernel", "model/embed/bias"}
    assert set(report.unchanged) == {"model/layers/1/bias", "model/layers/1/kernel"}
    assert "model/layers/0/kernel of the same stack is not included" in str(report)
