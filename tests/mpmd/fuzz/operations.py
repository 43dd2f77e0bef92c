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
    """Its attributes are made by `parts`: {name: function of what the layers share}."""

    parts: dict[str, Callable[[Shared], Any]] = {}  # noqa: RUF012

    def __init__(self, shared: Shared):
        for name, make in self.parts.items():
            setattr(self, name, make(shared))

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


def operation(name: str, feature: str, **parts: Callable[[Shared], Any]) -> Callable[[Any], Any]:
    """Adds a function (self, streams, context) -> streams to OPERATIONS, as a module with these parts."""

    def add(call: Any) -> Any:
        module = type(name, (Operation,), {"parts": parts, "__call__": call})
        OPERATIONS[name] = Entry(feature, name in CHANGING, module)
        return call

    return add


CHANGING = ("batch_norm", "dropout")  # operations without an order that write variables


def dense(shared: Shared, **kinds: Any) -> nnx.Linear:
    return nnx.Linear(WIDTH, WIDTH, rngs=shared.rngs, **kinds)


def unbiased(shared: Shared) -> nnx.Linear:
    return dense(shared, use_bias=False)


def weight(shared: Shared, *shape: int) -> nnx.Param:
    return nnx.Param(0.3 * jax.random.normal(shared.rngs.params(), shape))


def vector(shared: Shared) -> nnx.Param:
    return weight(shared, WIDTH)


def matrix(shared: Shared) -> nnx.Param:
    return weight(shared, WIDTH, WIDTH)


def plus(s: Streams, **changes: Any) -> Streams:
    """The streams with `changes` added."""
    return s | {name: s[name] + change for name, change in changes.items()}


# --- layers ---

WITH_PARAMETERS = ("linear", "mlp", "conv", "norm", "attention")  # every random layer has one of them


@operation("linear", "layers", linear=dense)
def linear(self, s, c):
    return plus(s, x=jnp.tanh(self.linear(s["x"])))


@operation("mlp", "layers", gate=unbiased, up=unbiased)
def mlp(self, s, c):
    return plus(s, x=nnx.silu(self.gate(s["x"])) * self.up(s["x"]))


@operation("conv", "layers", conv=lambda shared: nnx.Conv(WIDTH, WIDTH, kernel_size=(3,), rngs=shared.rngs))
def conv(self, s, c):
    return plus(s, x=jnp.sin(self.conv(s["x"])))


@operation("norm", "layers", norm=lambda shared: nnx.RMSNorm(WIDTH, rngs=shared.rngs))
def norm(self, s, c):
    return s | {"x": self.norm(s["x"])}


@operation("batch_norm", "statistics", norm=lambda shared: nnx.BatchNorm(WIDTH, momentum=0.5, rngs=shared.rngs))
def batch_norm(self, s, c):
    return plus(s, x=self.norm(s["x"]))


@operation("attention", "layers", query=unbiased, key=unbiased, value=unbiased)
def attention(self, s, c):
    scores = jnp.einsum("btw,bsw->bts", self.query(s["x"]), self.key(s["x"]))
    scores = jnp.where(c["mask"][:, None] > 0, scores, -1e9)
    return plus(s, x=jax.nn.softmax(scores) @ self.value(s["x"]))


@operation("dropout", "dropout", dropout=lambda shared: nnx.Dropout(0.3, rngs=shared.rngs))
def dropout(self, s, c):
    return s | {"x": self.dropout(s["x"])}


# --- inputs, integer streams, casts ---


@operation("features", "inputs", linear=dense)
def features(self, s, c):
    """A second input of the model, read in a layer."""
    return plus(s, x=c["mask"][..., None] * self.linear(c["features"]))


@operation("embed_integer", "integer", embed=lambda shared: nnx.Embed(VOCAB, WIDTH, rngs=shared.rngs))
def embed_integer(self, s, c):
    return plus(s, x=self.embed(s["n"]))


@operation("write_integer", "integer")
def write_integer(self, s, c):
    """Integers that depend on a float stream, for later layers."""
    return s | {"n": (3 * s["n"] + jnp.argmax(s["x"], -1)) % VOCAB}


@operation("gate_integer", "integer", scale=vector)
def gate_integer(self, s, c):
    return plus(s, x=jnp.where((s["n"] % 2 == 0)[..., None], s["x"] * self.scale, 0.0))


@operation("half", "cast")
def half(self, s, c):
    """Casts the stream; the next parameter promotes it."""
    return s | {"x": s["x"].astype(jnp.bfloat16)}


@operation("half_linear", "cast", linear=functools.partial(dense, dtype=jnp.bfloat16))
def half_linear(self, s, c):
    return plus(s, x=self.linear(s["x"]).astype(s["x"].dtype))


# --- complex streams ---


def complex_kernel(shared: Shared) -> nnx.Param:
    real, imag = (jax.random.normal(shared.rngs.params(), (WIDTH, WIDTH)) for _ in range(2))
    return nnx.Param(0.2 * (real + 1j * imag))


@operation("to_complex", "complex", scale=vector)
def to_complex(self, s, c):
    return plus(s, z=self.scale * jnp.fft.fft(s["x"].astype(jnp.float32), axis=-1))


@operation("rotate_complex", "complex", angle=vector)
def rotate_complex(self, s, c):
    """The transition of a diagonal state space model, made of real parameters."""
    return s | {"z": s["z"] * jax.lax.complex(jnp.cos(self.angle[...]), jnp.sin(self.angle[...]))}


@operation("complex_parameter", "complex", kernel=complex_kernel)
def complex_parameter(self, s, c):
    return s | {"z": s["z"] @ self.kernel}


@operation("from_complex", "complex", scale=vector)
def from_complex(self, s, c):
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


def ruled(rule: Callable[[jax.Array], jax.Array]) -> Any:
    """Applies a rule to the stream."""
    return lambda self, s, c: s | {"x": rule(s["x"])}


def stashed(rule: Callable[[jax.Array], jax.Array]) -> Any:
    """Passes a value of this layer to a later one, which `recall` adds: later stages could recompute it cheaply."""
    return lambda self, s, c: s | {"stash": rule(s["x"].astype(jnp.float32))}


for _name, (_feature, _rule) in RULES.items():
    if _name not in ("identity", "cast"):
        operation(_name, _feature)(ruled(_rule))
    operation(f"stash_{_name}", _feature)(stashed(_rule))


@operation("recall", "layers", scale=vector)
def recall(self, s, c):
    return plus(s, x=self.scale * s["stash"])


# --- parameters of several layers ---


@operation("table", "tied")
def table(self, s, c):
    """Reads the table that the model computes before its layers from its embedding."""
    return plus(s, x=jax.nn.softmax(s["x"] @ c["table"].T) @ c["table"])


@operation("strength", "tied")
def strength(self, s, c):
    """A learned scalar outside of the layers, in a function that closes over it."""
    return s | {"x": jax.jit(lambda x: x * c["strength"])(s["x"])}


@operation("tied", "tied", kernel=lambda shared: shared.kernel)
def tied(self, s, c):
    return plus(s, x=jnp.tanh(s["x"] @ self.kernel))


# --- losses and metrics of layers ---


@operation("loss", "auxiliary")
def loss(self, s, c):
    return plus(s, loss=jnp.sum(s["x"].astype(jnp.float32) ** 2))


@operation("metric", "auxiliary")
def metric(self, s, c):
    return plus(s, metric=jnp.sum(jnp.abs(s["x"].astype(jnp.float32))))


# --- variables. Their `order` of reads and writes is that of its letters ---


def zeros(*shape: int, start: float = 0.0) -> Callable[[Shared], Variable]:
    return lambda shared: Variable(jnp.full(shape, start))


def add_variable(self, s: Streams) -> Streams:
    return plus(s, x=(0.5 * self.variable[...]).astype(s["x"].dtype))


def in_orders(name: str, feature: str, *orders: str, read=add_variable, **parts: Callable[[Shared], Any]) -> Any:
    """Adds operations that read and write a variable in each order, such as "rw", "wr" or "rwr"."""
    parts = parts or {"variable": zeros(WIDTH)}

    def add(write: Any) -> Any:
        for order in orders:

            def call(self, s, c, order=order):
                for letter in order:
                    if letter == "r":
                        s = read(self, s)
                    else:
                        write(self, s, c)
                return s

            operation(f"{name}_{order}", feature, **parts)(call)
            OPERATIONS[f"{name}_{order}"] = OPERATIONS[f"{name}_{order}"]._replace(changes=True)
        return write

    return add


@in_orders("average", "variable", "rw", "wr", "rwr")
def average(self, s, c):
    mean = jax.lax.stop_gradient(s["x"]).mean((0, 1)).astype(jnp.float32)
    self.variable[...] = 0.7 * self.variable[...] + 0.3 * mean


@in_orders("count", "variable", "rw", "wrw")
def count(self, s, c):
    self.variable[...] += 0.1


@in_orders("memory", "variable", "rw", "wr", "rwr", variable=zeros(ROWS, LENGTH, WIDTH))
def memory(self, s, c):
    """The streams of the previous microbatch, which the stage before may compute."""
    self.variable[...] = jax.lax.stop_gradient(s["x"]).astype(jnp.float32)


@in_orders("from_batch", "variable", "rw", "wr")
def from_batch(self, s, c):
    self.variable[...] = c["features"].mean((0, 1))


@in_orders("literal", "without_equation", "rw", "wr", "rwr", variable=zeros())
def literal(self, s, c):
    self.variable[...] = jnp.asarray(0.8)


@in_orders("input", "without_equation", "rw", "wr", variable=zeros(ROWS, LENGTH, WIDTH))
def input_(self, s, c):
    """The new value is an array of the batch."""
    self.variable[...] = c["features"]


def scale_and_add(self, s: Streams) -> Streams:
    return plus(s, x=s["x"] * self.scale + jax.lax.stop_gradient(self.variable[...]))


@in_orders("parameter", "without_equation", "rw", "wr", read=scale_and_add, variable=zeros(WIDTH), scale=vector)
def parameter(self, s, c):
    """The new value is that of a parameter, as in a target network."""
    self.variable[...] = self.scale[...]


PAIR = {"variable": zeros(WIDTH, start=0.8), "other": zeros(WIDTH, start=-0.3)}


@in_orders("swap", "without_equation", "rw", "wr", "rwr", **PAIR)
def swap(self, s, c):
    """Two variables change places, so that the reads of two microbatches differ."""
    self.variable[...], self.other[...] = self.other[...], self.variable[...]


# Variables of several layers: refused if these are in several stages, but for a counter, which every stage computes.
in_orders("shared_average", "variable_of_layers", "rw", "r", variable=lambda shared: shared.average)(average)
in_orders("shared_count", "variable_of_layers", "rw", "wr", "r", variable=lambda shared: shared.count)(count)


# --- parameters that the forward pass changes ---


def change_weights(name: str, *orders: str) -> Callable[[Any], Any]:
    """A parameter that is used before or after its change by a function of it."""

    def use(self, s: Streams) -> Streams:
        return plus(s, x=jnp.tanh(s["x"] @ self.kernel))

    def add(change: Any) -> Any:
        def write(self, s, c):
            self.kernel[...] = change(self.kernel[...])

        in_orders(name, "changed_parameter", *orders, read=use, kernel=matrix)(write)
        return change

    return add


@change_weights("clip_weights", "rw", "wr")
def clip_weights(kernel):
    return jnp.clip(kernel, -0.2, 0.2)


@change_weights("normalize_weights", "rw", "wr")
def normalize_weights(kernel):
    return kernel / jnp.linalg.norm(kernel, axis=0)


@change_weights("shrink_weights", "rw", "wr", "rwr")
def shrink_weights(kernel):
    """A change in every microbatch, without a fixed point."""
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
