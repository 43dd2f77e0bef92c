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
    """The parts that the layers of one model have in common."""

    rngs: nnx.Rngs
    kernel: nnx.Param  # tied: several layers use it
    average: "Variable"
    count: "Variable"


class Operation(nnx.Module):
    """Its attributes are made by `parts`: {name: function of the parts that the layers share}."""

    parts: dict[str, Callable[[Shared], Any]] = {}  # noqa: RUF012

    def __init__(self, shared: Shared):
        for name, make in self.parts.items():
            setattr(self, name, make(shared))

    def __call__(self, s: Streams, c: Context) -> Streams:
        raise NotImplementedError


class Variable(nnx.Variable):
    """A variable that is not trained."""


class Entry(NamedTuple):
    """An operation of the grammar: a feature of models, and whether it writes variables."""

    feature: str
    changes: bool
    make: Callable[[Shared], Operation]


OPERATIONS: dict[str, Entry] = {}


def operation(name: str, feature: str, call: Any, **parts: Callable[[Shared], Any]) -> None:
    """Adds a function (self, streams, context) -> streams to OPERATIONS, as a module with these parts."""
    module = type(name, (Operation,), {"parts": parts, "__call__": lambda self, s, c: call(self, s, c)})
    OPERATIONS[name] = Entry(feature, name in CHANGING, module)


CHANGING = ("batch_norm", "dropout")  # operations without an order that write variables


def dense(shared: Shared, **kinds: Any) -> nnx.Linear:
    return nnx.Linear(WIDTH, WIDTH, rngs=shared.rngs, **kinds)


unbiased = functools.partial(dense, use_bias=False)
half_dense = functools.partial(dense, dtype=jnp.bfloat16)


def weight(shared: Shared, *shape: int) -> nnx.Param:
    return nnx.Param(0.3 * jax.random.normal(shared.rngs.params(), shape))


def vector(shared: Shared) -> nnx.Param:
    return weight(shared, WIDTH)


def matrix(shared: Shared) -> nnx.Param:
    return weight(shared, WIDTH, WIDTH)


def plus(s: Streams, **changes: Any) -> Streams:
    """The streams with `changes` added."""
    return s | {name: s[name] + change for name, change in changes.items()}


def adds(f: Callable[[Any, jax.Array], jax.Array], to: str = "x", of: str = "x") -> Any:
    """Adds f(operation, stream `of`) to the stream `to`."""
    return lambda o, s, c: plus(s, **{to: f(o, s[of])})


def sets(f: Callable[[Any, jax.Array], jax.Array], to: str = "x", of: str = "x") -> Any:
    """Sets the stream `to` to f(operation, stream `of`)."""
    return lambda o, s, c: s | {to: f(o, s[of])}


def made(make: Any, *sizes: int, **kinds: Any) -> Callable[[Shared], Any]:
    return lambda shared: make(*sizes, rngs=shared.rngs, **kinds)


def complex_kernel(shared: Shared) -> nnx.Param:
    real, imag = (jax.random.normal(shared.rngs.params(), (WIDTH, WIDTH)) for _ in range(2))
    return nnx.Param(0.2 * (real + 1j * imag))


# --- layers ---

WITH_PARAMETERS = ("linear", "mlp", "conv", "norm", "attention")  # every random layer has one of them


def gate_integer(o, s, c):
    return plus(s, x=jnp.where((s["n"] % 2 == 0)[..., None], s["x"] * o.scale, 0.0))


def attention(o, s, c):
    scores = jnp.einsum("btw,bsw->bts", o.query(s["x"]), o.key(s["x"]))
    scores = jnp.where(c["mask"][:, None] > 0, scores, -1e9)
    return plus(s, x=jax.nn.softmax(scores) @ o.value(s["x"]))


operation("linear", "layers", adds(lambda o, x: jnp.tanh(o.linear(x))), linear=dense)
operation("mlp", "layers", adds(lambda o, x: nnx.silu(o.gate(x)) * o.up(x)), gate=unbiased, up=unbiased)
operation("conv", "layers", adds(lambda o, x: jnp.sin(o.conv(x))), conv=made(nnx.Conv, WIDTH, WIDTH, kernel_size=(3,)))
operation("norm", "layers", sets(lambda o, x: o.norm(x)), norm=made(nnx.RMSNorm, WIDTH))
operation("batch_norm", "statistics", adds(lambda o, x: o.norm(x)), norm=made(nnx.BatchNorm, WIDTH, momentum=0.5))
operation("attention", "layers", attention, query=unbiased, key=unbiased, value=unbiased)
operation("dropout", "dropout", sets(lambda o, x: o.dropout(x)), dropout=made(nnx.Dropout, rate=0.3))

# --- inputs, integer streams, casts: the next parameter promotes the cast stream ---

operation("features", "inputs", lambda o, s, c: plus(s, x=c["mask"][..., None] * o.linear(c["features"])), linear=dense)
operation("embed_integer", "integer", adds(lambda o, n: o.embed(n), of="n"), embed=made(nnx.Embed, VOCAB, WIDTH))
operation("write_integer", "integer", lambda o, s, c: s | {"n": (3 * s["n"] + jnp.argmax(s["x"], -1)) % VOCAB})
operation("gate_integer", "integer", gate_integer, scale=vector)
operation("half", "cast", sets(lambda o, x: x.astype(jnp.bfloat16)))
operation("half_linear", "cast", adds(lambda o, x: o.linear(x).astype(x.dtype)), linear=half_dense)

# --- complex streams: a rotation by real parameters is the transition of a diagonal state space model ---

operation("to_complex", "complex", adds(lambda o, x: o.scale * jnp.fft.fft(x.astype("float32")), to="z"), scale=vector)
operation("rotate_complex", "complex", sets(lambda o, z: z * jnp.exp(1j * o.angle[...]), to="z", of="z"), angle=vector)
operation("complex_parameter", "complex", sets(lambda o, z: z @ o.kernel, to="z", of="z"), kernel=complex_kernel)
operation("from_complex", "complex", adds(lambda o, z: o.scale * jnp.fft.ifft(z).real, of="z"), scale=vector)

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


RULES: dict[str, tuple[str, Callable[[jax.Array], jax.Array]]] = {  # name -> (feature, function of an array)
    "identity": ("layers", lambda x: x),
    "tanh": ("layers", jnp.tanh),
    "cast": ("cast", lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)),
    "soft": ("custom_rule", soft),
    "halve": ("custom_rule", halve_gradient),
    "clip": ("nonlinear_rule", clip_gradient),
    "jit_clip": ("nonlinear_rule", jax.jit(lambda x: clip_gradient(x))),
    "remat_clip": ("nonlinear_rule", jax.checkpoint(lambda x: clip_gradient(jnp.sin(x)))),
    "cond_clip": ("nonlinear_rule", lambda x: jax.lax.cond(jnp.sum(x) < 1e9, clip_gradient, jnp.sin, x)),
    "scan_clip": (
        "nonlinear_rule",
        lambda x: jax.lax.scan(lambda x, _: (clip_gradient(0.9 * x), None), x, length=2)[0],
    ),
}


# A rule is applied to the stream, or to a value that `recall` adds later: later stages could recompute it cheaply.
for _name, (_feature, _rule) in RULES.items():
    if _name not in ("identity", "cast"):
        operation(_name, _feature, lambda o, s, c, rule=_rule: s | {"x": rule(s["x"])})
    operation(f"stash_{_name}", _feature, lambda o, s, c, rule=_rule: s | {"stash": rule(s["x"].astype(jnp.float32))})
operation("recall", "layers", lambda o, s, c: plus(s, x=o.scale * s["stash"]), scale=vector)

# --- parameters of several layers ---
# The table that the model computes from its embedding, a learned scalar in a function that closes over it, a kernel.

operation("table", "tied", lambda o, s, c: plus(s, x=jax.nn.softmax(s["x"] @ c["table"].T) @ c["table"]))
operation("strength", "tied", lambda o, s, c: s | {"x": jax.jit(lambda x: x * c["strength"])(s["x"])})
operation("tied", "tied", lambda o, s, c: plus(s, x=jnp.tanh(s["x"] @ o.kernel)), kernel=lambda shared: shared.kernel)

# --- losses and metrics of layers ---

operation("loss", "auxiliary", lambda o, s, c: plus(s, loss=jnp.sum(s["x"].astype(jnp.float32) ** 2)))
operation("metric", "auxiliary", lambda o, s, c: plus(s, metric=jnp.sum(jnp.abs(s["x"].astype(jnp.float32)))))

# --- variables. The letters of `order` are the order of reads and writes ---


def zeros(*shape: int, start: float = 0.0) -> Callable[[Shared], Variable]:
    return lambda shared: Variable(jnp.full(shape, start))


def add_variable(self, s: Streams) -> Streams:
    return plus(s, x=(0.5 * self.variable[...]).astype(s["x"].dtype))


def in_orders(
    name: str, feature: str, orders: str, write: Any, read: Any = add_variable, **parts: Callable[[Shared], Any]
) -> None:
    """Adds operations that read and write a variable in each order, such as "rw wr rwr"."""
    for order in orders.split():

        def call(self, s, c, order=order):
            for letter in order:
                if letter == "r":
                    s = read(self, s)
                else:
                    write(self, s, c)
            return s

        operation(f"{name}_{order}", feature, call, **(parts or {"variable": zeros(WIDTH)}))
        OPERATIONS[f"{name}_{order}"] = OPERATIONS[f"{name}_{order}"]._replace(changes=True)


def setting(new_value: Callable[..., Any]) -> Any:
    """Writes new_value(self, streams, context)."""

    def write(self, s: Streams, c: Context) -> None:
        self.variable[...] = new_value(self, s, c)

    return write


def stopped(s: Streams) -> jax.Array:
    return jax.lax.stop_gradient(s["x"]).astype(jnp.float32)


def scale_and_add(self, s: Streams) -> Streams:
    return plus(s, x=s["x"] * self.scale + jax.lax.stop_gradient(self.variable[...]))


def swap(self, s, c):
    """Two variables change places, so that the reads of two microbatches differ."""
    self.variable[...], self.other[...] = self.other[...], self.variable[...]


average = setting(lambda o, s, c: 0.7 * o.variable[...] + 0.3 * stopped(s).mean((0, 1)))
count = setting(lambda o, s, c: o.variable[...] + 0.1)
STREAM = {"variable": zeros(ROWS, LENGTH, WIDTH)}
PAIR = {"variable": zeros(WIDTH, start=0.8), "other": zeros(WIDTH, start=-0.3)}
in_orders("average", "variable", "rw wr rwr", average)
in_orders("count", "variable", "rw wrw", count)
in_orders("memory", "variable", "rw wr rwr", setting(lambda o, s, c: stopped(s)), **STREAM)  # of the last microbatch
in_orders("from_batch", "variable", "rw wr", setting(lambda o, s, c: c["features"].mean((0, 1))))
# New values that no equation computes: a literal, an array of the batch, a parameter, another variable.
in_orders("literal", "without_equation", "rw wr rwr", setting(lambda o, s, c: jnp.asarray(0.8)), variable=zeros())
in_orders("input", "without_equation", "rw wr", setting(lambda o, s, c: c["features"]), **STREAM)
in_orders(
    "parameter",
    "without_equation",
    "rw wr",
    setting(lambda o, s, c: o.scale[...]),
    scale_and_add,
    variable=zeros(WIDTH),
    scale=vector,
)
in_orders("swap", "without_equation", "rw wr rwr", swap, **PAIR)

# Variables of several layers: refused if these are in several stages, but for a counter, which every stage computes.
in_orders("shared_average", "variable_of_layers", "rw r", average, variable=lambda shared: shared.average)
in_orders("shared_count", "variable_of_layers", "rw wr r", count, variable=lambda shared: shared.count)


# --- parameters that the forward pass changes, and that are used before or after their change ---


def change_weights(name: str, orders: str, change: Callable[[jax.Array], jax.Array]) -> None:
    def use(self, s: Streams) -> Streams:
        return plus(s, x=jnp.tanh(s["x"] @ self.kernel))

    def write(self, s, c):
        self.kernel[...] = change(self.kernel[...])

    in_orders(name, "changed_parameter", orders, write, use, kernel=matrix)


change_weights("clip_weights", "rw wr", lambda kernel: jnp.clip(kernel, -0.2, 0.2))
change_weights("normalize_weights", "rw wr", lambda kernel: kernel / jnp.linalg.norm(kernel, axis=0))
# A change in every microbatch, without a fixed point.
change_weights("shrink_weights", "rw wr rwr", lambda kernel: 0.9 * jax.lax.stop_gradient(kernel))

# --- control flow around the operations of a layer ---

Body = Callable[[nnx.Module, Streams], Streams]


def _cast_like(s: Streams, like: Streams) -> Streams:
    return {name: s[name].astype(like[name].dtype) for name in s}


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
    "": Wrapper("layers", True, lambda body, layer, s, c: body(layer, s)),
    "remat": Wrapper("control", True, lambda body, layer, s, c: nnx.remat(body)(layer, s)),
    "checkpoint": Wrapper(
        "control", False, lambda body, layer, s, c: jax.checkpoint(functools.partial(body, layer))(s)
    ),
    "jit": Wrapper("control", True, lambda body, layer, s, c: nnx.jit(body)(layer, s)),
    "cond": Wrapper("control", True, _cond),
    "scan": Wrapper("control", False, _scan),
    "loop": Wrapper("control", True, _loop),
}
