"""The operations of which random models consist, by name.

An operation is a module that is called on the streams, which flow from layer to layer, and on the context, which all
layers read: `operation(streams, context) -> streams`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

ROWS, LENGTH, WIDTH, VOCAB = 2, 4, 8, 16  # of one microbatch
Streams = dict[str, jax.Array]  # x: float, z: complex, n: integer, stash: float, loss and metric: scalars
Context = dict[
    str, jax.Array
]  # tokens, features, mask: of the batch; table, strength: of parameters outside the layers


class Shared(NamedTuple):
    """What the layers of one model have in common."""

    rngs: nnx.Rngs
    kernel: nnx.Param  # tied: several layers use it
    average: "Variable"
    count: "Variable"


class Operation(nnx.Module):
    """An operation without parameters or variables; subclasses create theirs in `setup`."""

    def __init__(self, shared: Shared):
        self.setup(shared)

    def setup(self, shared: Shared) -> None: ...

    def __call__(self, s: Streams, c: Context) -> Streams:
        raise NotImplementedError


class Variable(nnx.Variable):
    """A variable that is not trained."""


class Entry(NamedTuple):
    """An operation of the grammar: the switch that excludes it, and whether it writes variables."""

    feature: str
    changes: bool
    make: Callable[[Shared], Operation]


OPERATIONS: dict[str, Entry] = {}


def operation(name: str, feature: str, *, changes: bool = False, **attributes: Any) -> Callable[[Any], Any]:
    """Adds a class to OPERATIONS; `attributes` are set on a subclass, so that one class may have several names."""

    def add(cls: Any) -> Any:
        OPERATIONS[name] = Entry(feature, changes, type(cls.__name__, (cls,), attributes))
        return cls

    return add


def dense(shared: Shared, **kinds: Any) -> nnx.Linear:
    return nnx.Linear(WIDTH, WIDTH, rngs=shared.rngs, **kinds)


def weight(shared: Shared, *shape: int) -> nnx.Param:
    return nnx.Param(0.3 * jax.random.normal(shared.rngs.params(), shape))


def plus(s: Streams, **changes: Any) -> Streams:
    """The streams with `changes` added."""
    return s | {name: s[name] + change for name, change in changes.items()}


# --- layers ---

WITH_PARAMETERS = ("linear", "mlp", "conv", "norm", "attention")  # every random layer has one of them


@operation("linear", "layers")
class Linear(Operation):
    def setup(self, shared):
        self.linear = dense(shared)

    def __call__(self, s, c):
        return plus(s, x=jnp.tanh(self.linear(s["x"])))


@operation("mlp", "layers")
class Mlp(Operation):
    def setup(self, shared):
        self.gate, self.up = dense(shared, use_bias=False), dense(shared, use_bias=False)

    def __call__(self, s, c):
        return plus(s, x=nnx.silu(self.gate(s["x"])) * self.up(s["x"]))


@operation("conv", "layers")
class Conv(Operation):
    def setup(self, shared):
        self.conv = nnx.Conv(WIDTH, WIDTH, kernel_size=(3,), rngs=shared.rngs)

    def __call__(self, s, c):
        return plus(s, x=jnp.sin(self.conv(s["x"])))


@operation("norm", "layers")
class Norm(Operation):
    def setup(self, shared):
        self.norm = nnx.RMSNorm(WIDTH, rngs=shared.rngs)

    def __call__(self, s, c):
        return s | {"x": self.norm(s["x"])}


@operation("batch_norm", "statistics", changes=True)
class BatchNorm(Operation):
    def setup(self, shared):
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=shared.rngs)

    def __call__(self, s, c):
        return plus(s, x=self.norm(s["x"]))


@operation("attention", "layers")
class Attention(Operation):
    def setup(self, shared):
        self.query, self.key, self.value = (dense(shared, use_bias=False) for _ in range(3))

    def __call__(self, s, c):
        scores = jnp.einsum("btw,bsw->bts", self.query(s["x"]), self.key(s["x"]))
        scores = jnp.where(c["mask"][:, None] > 0, scores, -1e9)
        return plus(s, x=jax.nn.softmax(scores) @ self.value(s["x"]))


@operation("dropout", "dropout", changes=True)
class Dropout(Operation):
    def setup(self, shared):
        self.dropout = nnx.Dropout(0.3, rngs=shared.rngs)

    def __call__(self, s, c):
        return s | {"x": self.dropout(s["x"])}


# --- inputs, integer streams, casts ---


@operation("features", "inputs")
class Features(Operation):
    """A second input of the model, read in a layer."""

    def setup(self, shared):
        self.linear = dense(shared)

    def __call__(self, s, c):
        return plus(s, x=c["mask"][..., None] * self.linear(c["features"]))


@operation("embed_integer", "integer")
class EmbedInteger(Operation):
    def setup(self, shared):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=shared.rngs)

    def __call__(self, s, c):
        return plus(s, x=self.embed(s["n"]))


@operation("write_integer", "integer")
class WriteInteger(Operation):
    """Integers that depend on a float stream, for later layers."""

    def __call__(self, s, c):
        return s | {"n": (3 * s["n"] + jnp.argmax(s["x"], -1)) % VOCAB}


@operation("gate_integer", "integer")
class GateInteger(Operation):
    def setup(self, shared):
        self.scale = weight(shared, WIDTH)

    def __call__(self, s, c):
        return plus(s, x=jnp.where((s["n"] % 2 == 0)[..., None], s["x"] * self.scale, 0.0))


@operation("half", "cast")
class Half(Operation):
    """Casts the stream; the next parameter promotes it."""

    def __call__(self, s, c):
        return s | {"x": s["x"].astype(jnp.bfloat16)}


@operation("half_linear", "cast")
class HalfLinear(Operation):
    def setup(self, shared):
        self.linear = dense(shared, dtype=jnp.bfloat16)

    def __call__(self, s, c):
        return plus(s, x=self.linear(s["x"]).astype(s["x"].dtype))


# --- complex streams ---


@operation("to_complex", "complex")
class ToComplex(Operation):
    def setup(self, shared):
        self.scale = weight(shared, WIDTH)

    def __call__(self, s, c):
        return plus(s, z=self.scale * jnp.fft.fft(s["x"].astype(jnp.float32), axis=-1))


@operation("rotate_complex", "complex")
class RotateComplex(Operation):
    """The transition of a diagonal state space model, made of real parameters."""

    def setup(self, shared):
        self.angle = weight(shared, WIDTH)

    def __call__(self, s, c):
        return s | {"z": s["z"] * jax.lax.complex(jnp.cos(self.angle[...]), jnp.sin(self.angle[...]))}


@operation("complex_parameter", "complex")
class ComplexParameter(Operation):
    def setup(self, shared):
        real, imag = (jax.random.normal(shared.rngs.params(), (WIDTH, WIDTH)) for _ in range(2))
        self.kernel = nnx.Param(0.2 * (real + 1j * imag))

    def __call__(self, s, c):
        return s | {"z": s["z"] @ self.kernel}


@operation("from_complex", "complex")
class FromComplex(Operation):
    def setup(self, shared):
        self.scale = weight(shared, WIDTH)

    def __call__(self, s, c):
        return plus(s, x=self.scale * jnp.fft.ifft(s["z"], axis=-1).real)


# --- rules for derivatives ---


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(x.astype(jnp.float32) ** 2))


@jax.custom_vjp
def clip_gradient(x: jax.Array) -> jax.Array:
    """The identity, whose cotangent is scaled to a norm of at most 0.1: the rule is not linear."""
    return x


clip_gradient.defvjp(
    lambda x: (x, None), lambda _, g: ((g / jnp.maximum(1.0, _norm(g) / 0.1).astype(g.dtype)).astype(g.dtype),)
)


@jax.custom_vjp
def halve_gradient(x: jax.Array) -> jax.Array:
    return x


halve_gradient.defvjp(lambda x: (x, None), lambda _, g: (0.5 * g,))


@jax.custom_jvp
def soft(x: jax.Array) -> jax.Array:
    return x / (1.0 + jnp.abs(x))


soft.defjvp(lambda primals, tangents: (soft(primals[0]), tangents[0] / (1.0 + jnp.abs(primals[0])) ** 2))


def _cond_clip(x: jax.Array) -> jax.Array:
    return jax.lax.cond(jnp.sum(x) < 1e9, clip_gradient, lambda x: 2 * x, x)


def _scan_clip(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (clip_gradient(0.9 * x), None), x, None, length=2)[0]


RULES: dict[str, tuple[str, Callable[[jax.Array], jax.Array]]] = {  # name -> (switch, function of an array)
    "identity": ("layers", lambda x: x),
    "tanh": ("layers", jnp.tanh),
    "cast": ("cast", lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)),
    "soft": ("custom_rule", soft),
    "halve": ("custom_rule", halve_gradient),
    "clip": ("nonlinear_rule", clip_gradient),
    "jit_clip": ("nonlinear_rule", jax.jit(lambda x: clip_gradient(x))),
    "remat_clip": ("nonlinear_rule", jax.checkpoint(lambda x: clip_gradient(jnp.sin(x)))),
    "cond_clip": ("nonlinear_rule", _cond_clip),
    "scan_clip": ("nonlinear_rule", _scan_clip),
}


class Ruled(Operation):
    """Applies a rule to the stream."""

    rule: str

    def __call__(self, s, c):
        return s | {"x": RULES[self.rule][1](s["x"])}


class Stash(Operation):
    """Passes a value of this layer to a later one, which `recall` adds: later stages could recompute it cheaply."""

    rule: str

    def __call__(self, s, c):
        return s | {"stash": RULES[self.rule][1](s["x"].astype(jnp.float32))}


for _name, (_feature, _) in RULES.items():
    if _name not in ("identity", "cast"):
        operation(_name, _feature, rule=_name)(Ruled)
    operation(f"stash_{_name}", _feature, rule=_name)(Stash)


@operation("recall", "layers")
class Recall(Operation):
    def setup(self, shared):
        self.scale = weight(shared, WIDTH)

    def __call__(self, s, c):
        return plus(s, x=self.scale * s["stash"])


# --- parameters of several layers ---


@operation("table", "tied")
class Table(Operation):
    """Reads the table that the model computes before its layers from its embedding."""

    def __call__(self, s, c):
        return plus(s, x=jax.nn.softmax(s["x"] @ c["table"].T) @ c["table"])


@operation("strength", "tied")
class Strength(Operation):
    """A learned scalar outside of the layers, in a function that closes over it."""

    def __call__(self, s, c):
        return s | {"x": jax.jit(lambda x: x * c["strength"])(s["x"])}


@operation("tied", "tied")
class Tied(Operation):
    def setup(self, shared):
        self.kernel = shared.kernel

    def __call__(self, s, c):
        return plus(s, x=jnp.tanh(s["x"] @ self.kernel))


# --- losses and metrics of layers ---


@operation("loss", "auxiliary")
class Loss(Operation):
    def __call__(self, s, c):
        return plus(s, loss=jnp.sum(s["x"].astype(jnp.float32) ** 2))


@operation("metric", "auxiliary")
class Metric(Operation):
    def __call__(self, s, c):
        return plus(s, metric=jnp.sum(jnp.abs(s["x"].astype(jnp.float32))))


# --- variables. Their `order` of reads and writes is that of its letters ---


class Ordered(Operation):
    """Reads and writes a variable in an order such as "rw", "wr", "rwr" or "wrw"."""

    order: str
    start: float = 0.0

    def setup(self, shared):
        self.variable = Variable(jnp.full((WIDTH,), self.start))

    def read(self, s: Streams) -> Streams:
        return plus(s, x=(0.5 * self.variable[...]).astype(s["x"].dtype))

    def write(self, s: Streams, c: Context) -> None:
        raise NotImplementedError

    def __call__(self, s, c):
        for letter in self.order:
            if letter == "r":
                s = self.read(s)
            else:
                self.write(s, c)
        return s


def in_orders(name: str, feature: str, *orders: str) -> Callable[[Any], Any]:
    def add(cls: Any) -> Any:
        for order in orders:
            operation(f"{name}_{order}", feature, changes=True, order=order)(cls)
        return cls

    return add


@in_orders("average", "variable", "rw", "wr", "rwr")
class Average(Ordered):
    def write(self, s, c):
        mean = jax.lax.stop_gradient(s["x"]).mean((0, 1)).astype(jnp.float32)
        self.variable[...] = 0.7 * self.variable[...] + 0.3 * mean


@in_orders("count", "variable", "rw", "wrw")
class Count(Ordered):
    def write(self, s, c):
        self.variable[...] += 0.1


@in_orders("memory", "variable", "rw", "wr", "rwr")
class MemoryOfInput(Ordered):
    """The streams of the previous microbatch, which the stage before may compute."""

    def setup(self, shared):
        self.variable = Variable(jnp.zeros((ROWS, LENGTH, WIDTH)))

    def write(self, s, c):
        self.variable[...] = jax.lax.stop_gradient(s["x"]).astype(jnp.float32)


@in_orders("from_batch", "variable", "rw", "wr")
class FromBatch(Ordered):
    def write(self, s, c):
        self.variable[...] = c["features"].mean((0, 1))


@in_orders("literal", "without_equation", "rw", "wr", "rwr")
class Literal(Ordered):
    """The new value is a literal."""

    def setup(self, shared):
        self.variable = Variable(jnp.asarray(0.0))

    def write(self, s, c):
        self.variable[...] = jnp.asarray(0.8)


@in_orders("input", "without_equation", "rw", "wr")
class Input(Ordered):
    """The new value is an array of the batch."""

    def setup(self, shared):
        self.variable = Variable(jnp.zeros((ROWS, LENGTH, WIDTH)))

    def write(self, s, c):
        self.variable[...] = c["features"]


@in_orders("parameter", "without_equation", "rw", "wr")
class Parameter(Ordered):
    """The new value is that of a parameter, as in a target network."""

    def setup(self, shared):
        self.variable, self.scale = Variable(jnp.zeros((WIDTH,))), weight(shared, WIDTH)

    def write(self, s, c):
        self.variable[...] = self.scale[...]

    def read(self, s):
        return plus(s, x=s["x"] * self.scale + jax.lax.stop_gradient(self.variable[...]))


@in_orders("swap", "without_equation", "rw", "wr", "rwr")
class Swap(Ordered):
    """Two variables change places, so that the reads of two microbatches differ."""

    start = 0.4

    def setup(self, shared):
        self.variable, self.other = Variable(jnp.full((WIDTH,), 0.8)), Variable(jnp.full((WIDTH,), -0.3))

    def write(self, s, c):
        self.variable[...], self.other[...] = self.other[...], self.variable[...]


@in_orders("shared_average", "variable_of_layers", "rw", "r")
class SharedAverage(Average):
    """A variable of several layers: refused if these are in several stages."""

    def setup(self, shared):
        self.variable = shared.average


@in_orders("shared_count", "variable_of_layers", "rw", "wr", "r")
class SharedCount(Count):
    """A counter of several layers, which every stage computes."""

    def setup(self, shared):
        self.variable = shared.count


# --- parameters that the forward pass changes ---


class Changed(Operation):
    """Uses a parameter before or after its change."""

    order: str

    def setup(self, shared):
        self.kernel = weight(shared, WIDTH, WIDTH)

    def change(self, kernel: jax.Array) -> jax.Array:
        raise NotImplementedError

    def __call__(self, s, c):
        for letter in self.order:
            if letter == "r":
                s = plus(s, x=jnp.tanh(s["x"] @ self.kernel))
            else:
                self.kernel[...] = self.change(self.kernel[...])
        return s


@in_orders("clip_weights", "changed_parameter", "rw", "wr")
class ClipWeights(Changed):
    def change(self, kernel):
        return jnp.clip(kernel, -0.2, 0.2)


@in_orders("normalize_weights", "changed_parameter", "rw", "wr")
class NormalizeWeights(Changed):
    def change(self, kernel):
        return kernel / jnp.linalg.norm(kernel, axis=0)


@in_orders("shrink_weights", "changed_parameter", "rw", "wr", "rwr")
class ShrinkWeights(Changed):
    """A change in every microbatch, without a fixed point."""

    def change(self, kernel):
        return 0.9 * jax.lax.stop_gradient(kernel)


# --- control flow around the operations of a layer ---

Body = Callable[[nnx.Module, Streams], Streams]


def _cast_like(s: Streams, like: Streams) -> Streams:
    return {name: s[name].astype(like[name].dtype) for name in s}


def _plain(body: Body, layer: nnx.Module, s: Streams, c: Context) -> Streams:
    return body(layer, s)


def _remat(body: Body, layer: nnx.Module, s: Streams, c: Context) -> Streams:
    return nnx.remat(body)(layer, s)


def _checkpoint(body: Body, layer: nnx.Module, s: Streams, c: Context) -> Streams:
    return jax.checkpoint(functools.partial(body, layer))(s)


def _jit(body: Body, layer: nnx.Module, s: Streams, c: Context) -> Streams:
    return nnx.jit(body)(layer, s)


def _cond(body: Body, layer: nnx.Module, s: Streams, c: Context) -> Streams:
    """The body in about half of the microbatches."""

    def branch(layer: nnx.Module, s: Streams) -> Streams:
        return _cast_like(body(layer, s), s)

    return nnx.cond(jnp.sum(c["tokens"]) % 2 == 0, branch, lambda layer, s: s, layer, s)


def _scan(body: Body, layer: nnx.Module, s: Streams, c: Context) -> Streams:
    return jax.lax.scan(lambda s, _: (_cast_like(body(layer, s), s), None), s, None, length=2)[0]


def _loop(body: Body, layer: nnx.Module, s: Streams, c: Context) -> Streams:
    """A loop with the layer, and so its variables, among the values that it carries."""

    def turn(_: Any, carry: Any) -> Any:
        layer, s = carry
        return layer, _cast_like(body(layer, s), s)

    return nnx.fori_loop(0, 2, turn, (layer, s))[1]


class Wrapper(NamedTuple):
    feature: str
    permits_changes: bool
    call: Callable[[Body, nnx.Module, Streams, Context], Streams]


WRAPPERS = {
    "": Wrapper("layers", True, _plain),
    "remat": Wrapper("control", True, _remat),
    "checkpoint": Wrapper("control", False, _checkpoint),
    "jit": Wrapper("control", True, _jit),
    "cond": Wrapper("control", True, _cond),
    "scan": Wrapper("control", False, _scan),
    "loop": Wrapper("control", True, _loop),
}
FEATURES = tuple(dict.fromkeys([e.feature for e in OPERATIONS.values()] + [w.feature for w in WRAPPERS.values()]))
