"""Constructors of every kind, and the comparison of two ways to initialize them."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import flax_mesh as fm
from flax_mesh.sharding.initialize import run

READ = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)  # as from a file
TABLE = np.linspace(0.1, 1.7, 2048).astype(np.float32)
KEY, RAW = np.array([0, 7], np.uint32), np.array([0, 3], np.uint32)
draw = jax.random.normal


class Cheap(nnx.Module):
    """Shared values, keys used twice, constants, literals that depend on the layer, keys and numbers as variables."""

    def __init__(self, layer: int, rngs: nnx.Rngs):
        shared, key = draw(rngs.params(), (8, 8)), rngs.params()
        self.shared = nnx.List([nnx.Param(shared), nnx.Param(2 * shared), nnx.Param(shared.sum(0))])
        self.twice = nnx.List([nnx.Param(draw(key, (8, 8))), nnx.Param(jax.random.uniform(key, (8, 8)))])
        self.small = nnx.List([nnx.Param(draw(rngs.params(), (size,))) for size in (1, 3)])
        self.depth = nnx.Param(draw(rngs.params(), (8, 8)) / np.sqrt(2 * (layer + 1)))
        self.read = nnx.List([nnx.Param(jnp.asarray(READ) * 1.5), nnx.Param(READ + layer), nnx.Param(jnp.exp(READ[0]))])
        self.tables = nnx.List([nnx.Variable(jnp.asarray(TABLE)), nnx.Variable(jnp.cos(TABLE))])
        self.rope = nnx.Variable(jnp.cos(jnp.arange(32)[:, None] * 10000.0 ** (-jnp.arange(8) / 8)))
        self.numbers = nnx.List([nnx.Variable(x) for x in (jnp.asarray(3), jnp.add(1, layer), jnp.full(8, 3))])
        self.more = nnx.List([nnx.Variable(x) for x in (jnp.asarray(True), jnp.arange(8, dtype=jnp.int8))])
        on_mesh = jax.lax.with_sharding_constraint(jnp.arange(8) + layer, jax.P())
        self.on_mesh = nnx.Variable(on_mesh)
        self.of_layer = nnx.Variable(jnp.asarray(layer, jnp.int32))
        self.keys = nnx.List([nnx.Variable(jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(KEY)), layer))])
        self.keys.append(nnx.Variable(jax.random.fold_in(RAW, layer)))
        self.of_raw = nnx.Param(draw(jax.random.fold_in(RAW, layer), (8, 8)))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


class Dear(nnx.Module):
    """All initializers, loops, branches, custom derivatives, other kinds of keys, and layers of Flax."""

    def __init__(self, layer: int, rngs: nnx.Rngs):
        initial, key = nnx.initializers, rngs.params
        of_flax = (initial.normal(), initial.lecun_normal(), initial.he_uniform(), initial.truncated_normal())
        self.plain = nnx.List([nnx.Param(f(key(), (16, 8), x)) for f in of_flax for x in (jnp.float32, jnp.bfloat16)])
        self.orthogonal = nnx.Param(initial.orthogonal()(key(), (16, 8)))
        self.gamma = nnx.List([nnx.Param(jax.random.gamma(key(), 2.0, (8,)))])
        self.gamma.append(nnx.Param(jax.random.dirichlet(key(), jnp.ones(8))))
        x = draw(key(), (8, 16))
        self.normed = nnx.List([nnx.Param(x / jnp.linalg.norm(x)), nnx.Param(x)])
        self.small = nnx.List([nnx.Param(draw(key(), (size,))) for size in (1, 4, 8, 64)])
        dt = jnp.exp(jax.random.uniform(key(), (16,)) * 3 - 4)
        self.ssm = nnx.List([nnx.Param(dt + jnp.log(-jnp.expm1(-dt))), nnx.Param(jax.nn.softplus(dt))])
        self.ssm.append(nnx.Param(jax.nn.silu(dt) + jax.nn.logsumexp(dt)))
        steps = lambda total, key: (total + 1, draw(key, (8,)) * total)  # noqa: E731
        self.loops = nnx.List([nnx.Param(jax.lax.scan(steps, 1.0, jax.random.split(key(), 8))[1])])
        self.loops.append(nnx.Param(jax.lax.fori_loop(0, 3, lambda i, x: x * 1.1 + i, draw(key(), (8, 8)))))
        grow = lambda x: x + jnp.abs(x)  # noqa: E731
        self.loops.append(nnx.Param(jax.lax.while_loop(lambda x: jnp.sum(x) < 50, grow, draw(key(), (8, 8)))))
        chosen = jax.lax.cond(jax.random.bernoulli(key()), lambda: jnp.ones(8), lambda: jnp.zeros(8))
        self.chosen = nnx.List([nnx.Param(chosen), nnx.Variable(jax.random.permutation(key(), 16))])
        self.other_keys = nnx.List([nnx.Param(draw(jax.random.key(layer, impl="rbg"), (8, 8)))])
        self.other_keys.append(nnx.Param(draw(jax.random.split(jax.random.key(layer, impl="unsafe_rbg"))[1], (8, 8))))
        self.lora, self.norm = nnx.LoRA(8, 2, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, 8, rngs=rngs, decode=False)
        self.conv, self.embed = nnx.Conv(4, 8, (3, 3), rngs=rngs), nnx.Embed(16, 8, rngs=rngs)
        rows = jax.vmap(lambda key: draw(key, (8, 8)))(jax.random.split(key(), 3))
        self.rows = nnx.List([nnx.Param(rows[0]), nnx.Param(rows[1])])


class Net(nnx.Module):
    def __init__(self, block: Callable[[int, nnx.Rngs], nnx.Module], depth: int = 2):
        rngs = nnx.Rngs(params=0, dropout=1)
        self.layers = nnx.List([block(layer, rngs) for layer in range(depth)])
        self.stack = nnx.split_rngs(splits=4)(nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs), in_axes=(0,)))(rngs)


def trained(make: Callable[[], nnx.Module]) -> tuple[nnx.Module, nnx.Optimizer]:
    model = make()
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


class Ways:
    """The state by one program, and by kinds although it may cost more."""

    def __init__(self, monkeypatch):
        self.set, self.compiled, compile_kinds = functools.partial(monkeypatch.setattr, run), 0, run._compiled

        def count(*arguments):
            self.compiled += 1
            return compile_kinds(*arguments)

        self.set("_compiled", count)

    def whole(self, initialize: Callable[[], object]) -> object:
        self.set("EARLY", 1e9)
        return self._run(initialize, is_cut=False)

    def by_kind(self, initialize: Callable[[], object]) -> object:
        self.set("EARLY", -1e9)
        self.set("PROGRAM", -1)
        return self._run(initialize, is_cut=True)

    def _run(self, initialize: Callable[[], object], *, is_cut: bool) -> object:
        before, made = self.compiled, initialize()
        assert (self.compiled > before) == is_cut
        return made


def differences(one: object, other: object) -> list[str]:
    """Paths of the leaves of which anything differs: bits, type, sharding."""
    pairs = zip(fm.named_leaves(one), fm.named_leaves(other), strict=True)
    return [path for (path, a), (_, b) in pairs if _facts(a) != _facts(b)]


def _facts(x: jax.Array) -> tuple[object, ...]:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    weak = None if is_key else x.weak_type
    shards = [np.asarray(jax.random.key_data(s.data) if is_key else s.data).tobytes() for s in x.addressable_shards]
    return x.shape, x.dtype, weak, x.sharding, x.committed, type(x), shards
