"""Models, batches and arguments that cannot be split: the errors name the cause, its line and the repair, once."""

import functools
import re
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mesh import create_mesh
from flax_mesh.mpmd import CutError, split_stages
from tests.mpmd.zoo.base import WIDTH, squared_loss, vectors
from tests.mpmd.zoo.calls import Attributes
from tests.mpmd.zoo.variables import Layer, Memory, Model


class Plain(nnx.Module):
    """Layers that a subclass calls in a different way."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.head(x)


class Indexed(Plain):
    def __call__(self, x):
        stacked = jnp.stack([layer.kernel[...] for layer in self.layers])
        for i in range(4):
            x = jnp.tanh(x @ stacked[i])
        return x


class IndexedStack(nnx.Module):
    """Each range of layers of the stack is a variable with one path."""

    def __init__(self):
        make = nnx.vmap(lambda key: nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(key)))
        self.layers = make(jax.random.split(jax.random.key(0), 4))

    def __call__(self, x):
        return jax.lax.fori_loop(0, 4, lambda i, x: jnp.tanh(x @ self.layers.kernel[...][i]), x)


class Entries(Model):
    def __init__(self):
        self.layers = nnx.Dict({name: Layer(nnx.Rngs(0)) for name in "abcd"})

    def __call__(self, x):
        for name in "abcd":
            x = self.layers[name](x)
        return x


class Activation(nnx.Module):
    def __call__(self, x):
        return jnp.tanh(x)


class WithoutVariables(Plain):
    def __init__(self):
        super().__init__()
        self.layers = nnx.List([Activation() for _ in range(4)])


class Averaging(Layer):
    """Its statistics are read before all layers."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.mean = Memory(jnp.zeros(WIDTH))

    def __call__(self, x):
        self.mean[...] = 0.5 * self.mean[...] + jax.lax.stop_gradient(x).mean(0)
        return super().__call__(x)


class OtherList(Model):
    """Its layers are in `blocks`, and not in `layers`."""

    def __init__(self):
        super().__init__()
        self.blocks = nnx.List([Averaging(nnx.Rngs(0)) for _ in range(12)])

    def __call__(self, x):
        x = x + sum(block.mean[...] for block in self.blocks)
        for layer in [*self.layers, *self.blocks]:
            x = layer(x)
        return x


class OnAMesh(Layer):
    def __call__(self, x):
        return super().__call__(jax.lax.with_sharding_constraint(x, NamedSharding(create_mesh((8,), ("fsdp",)), P())))


class Constrained(Model):
    layer = OnAMesh


def split(make, layers: Any = "layers", num_stages=3, loss_fn=squared_loss, batch=None, **kinds):
    batch = vectors(2) if batch is None else batch
    return split_stages(loss_fn, make, batch, layers=layers, num_stages=num_stages, **kinds)


HERE = re.escape(__file__)
MEAN = rf"^blocks/\{{0..11\}}/mean changes in stage 2 \({HERE}:\d+ \(Averaging.__call__\)\) and is read in stage 0 "
REFUSED = {
    "indexed": (
        Indexed,
        rf"^stages 0, 1 compute nothing: \w+ \({HERE}:\d+ \(Indexed.__call__\)\) takes the variables of several layers "
        r"at once, layers/\{0..3\}/kernel, .* do not stack or index their variables [^\n]*$",
    ),
    "indexed stack": (IndexedStack, r"takes the variables of several layers at once, layers/kernel, and what follows"),
    "dict": (Entries, r"one layer, .* neither a list nor a stack, .*\('layers/a', 'layers/b', 'layers/c', 'layers/d'"),
    "no list": (Attributes, r"It has no list\. It has modules at 'first', 'norm', 'out', 'second'\. Each module may"),
    "uncalled": (Plain, r"4 layers, of which the loss uses none\. Name .* that the model calls\. .* lists at 'layers'"),
    "without variables": (WithoutVariables, r"layers=layers has no variables, so no part of the loss"),
    "another list": (OtherList, MEAN + r".*OtherList.__call__.*\nAn earlier stage cannot see .* Only layers is split"),
    "a mesh": (Constrained, rf"the mesh of its own group:\n{HERE}:\d+ \(OnAMesh.__call__\): P\(\) on 8 devices\nPass"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_is_refused_with_the_cause_its_line_and_the_repair(name):
    make, message = REFUSED[name]
    with pytest.raises(CutError, match=message) as caught:
        split(make, None if name == "no list" else "layers")
    assert "at most 0" not in str(caught.value) and "no path" not in str(caught.value)


ORDERS = [
    (
        nnx.Dropout(0.5),
        squared_loss,
        "takes loss_fn, a function, before the model: got an object of type Dropout and the func",
    ),
    (lambda: Model(), squared_loss, "got the function <lambda> and the function squared_loss, which requires argum"),
    (squared_loss, 3, "model must be an nnx.Module, or a function without arguments .* and an object of type int"),
    (squared_loss, lambda: 3, "must return an nnx.Module, got an object of type int"),
]


@pytest.mark.parametrize(("loss_fn", "model", "message"), ORDERS)
def test_arguments_in_another_order_are_refused(loss_fn, model, message):
    with pytest.raises(ValueError, match=message):
        split(model, loss_fn=loss_fn)


class QuantizedLayer(Layer):
    dtype, kind = jnp.int8, nnx.Param

    def __init__(self, rngs):
        super().__init__(rngs)
        self.scale = self.kind(jnp.ones(WIDTH, self.dtype))

    def __call__(self, x):
        return super().__call__(x * self.scale[...].astype(x.dtype))


def quantized(dtype, kind: Any = nnx.Param):
    layer = type("Quantized", (QuantizedLayer,), {"dtype": dtype, "kind": kind})
    return type("QuantizedModel", (Model,), {"layer": layer})


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_trained_variables_without_sums_in_float32_are_refused(dtype):
    message = rf"at least 16 bits, .*: layers/\{{0..3\}}/scale \({jnp.dtype(dtype)}\)\. Make them Variables of another"
    with pytest.raises(ValueError, match=message):
        split(quantized(dtype))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.slow
def test_variables_of_few_bits_that_are_not_trained_are_split(dtype):
    split(quantized(dtype, Memory), check=True)
    jax.clear_caches()  # the check compiles initializers with other options, and later tests would use them


def test_a_table_that_an_earlier_trace_left_is_named():
    @functools.lru_cache
    def table():
        return jnp.sin(jnp.arange(8.0))

    def loss_fn(model, batch):
        loss, weight = squared_loss(model, batch)
        return loss * table().sum(), weight

    class Chain(Plain):
        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    message = r"^the loss function must not keep values of an earlier trace, but it uses f32\[8\] of one.*lru_cache"
    with pytest.raises(ValueError, match=message):
        split_stages(loss_fn, Chain, vectors(4), num_stages=2)


def doubled(x):
    reference = jax.new_ref(x)
    reference[...] = reference[...] * 2
    return reference[...]


@pytest.mark.parametrize("double", [doubled, jax.jit(doubled)])
def test_a_mutable_reference_is_refused_with_its_line_but_not_inside_of_a_loop(double):
    class Doubles(Plain):
        def __call__(self, x):
            for layer in self.layers:
                x = layer(double(x))
            return x

    class Loops(Plain):
        def __call__(self, x):
            for layer in self.layers:
                x = layer(jax.lax.scan(lambda x, _: (doubled(x), None), x, None, length=2)[0])
            return x

    with pytest.raises(CutError, match=r"must not use mutable references .*\n.*test_problems\.py:\d+ \(doubled\)"):
        split_stages(squared_loss, Doubles, vectors(4), num_stages=2)
    split_stages(squared_loss, Loops, vectors(4), num_stages=2)


BATCHES = {
    "a number": ({"weight": 3.0}, "batch 'weight' is of type float; it must be an array of numbers"),
    "a string": (
        {"name": "dog"},
        r"batch 'name' is of type str; .*\n.*Close over other values in loss_fn, or leave them",
    ),
    "strings": ({"names": np.array(["a", "b"] * 4)}, "batch 'names' is an array of <U1; it must"),
    "class weights": (
        {"weights": np.ones(5)},
        r"numbers of rows, \[5, 8\]; they must be equal: 5 in 'weights'; 8 in 'x', 'y'\. Close over .* class weights",
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_with_anything_but_rows_is_refused_with_the_remedy(name):
    extra, message = BATCHES[name]
    with pytest.raises(ValueError, match=message):
        split(Model, batch=vectors(8) | extra, num_microbatches=4)


def test_eval_in_a_loss_function_is_refused_with_the_attribute():
    class Dropping(Model):
        def __init__(self):
            super().__init__()
            self.drop = nnx.Dropout(0.1, rngs=nnx.Rngs(0))

    def evaluated(model, batch):
        model.eval()
        return squared_loss(model, batch)

    message = r"attribute 'deterministic' was False, is True\nCreate all variables in .* call train"
    with pytest.raises(ValueError, match=message):
        split(Dropping, loss_fn=evaluated)


class Widening(nnx.Module):
    """Layers whose activations are 16 times as large at one boundary, where the FLOPs are equal on both sides."""

    def __init__(self, wide: int = 16):
        rngs = nnx.Rngs(0)
        sizes = [WIDTH, WIDTH, WIDTH, wide * WIDTH, WIDTH, WIDTH]
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(sizes)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def test_stages_are_not_cut_where_many_times_the_bytes_cross():
    staged = split(Widening, num_stages=2)
    assert staged.bounds == (0, 2, 5)
    assert str(staged).splitlines()[-1] == (
        "cuts=[2]: activations of 128 B at the boundaries; for equal FLOPs alone, cuts=[3]: 2.00 KiB"
    )
    equal = split(lambda: Widening(1), num_stages=2)
    assert equal.remark == "" and "alone" not in str(equal)
