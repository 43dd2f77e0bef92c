"""Facts of values through every kind of body, alone and nested: dependence on inputs, and unchanged inputs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from flax_mesh.mesh.create import create_mesh
from flax_mesh.program.follow import DEPENDS, Flow, all_equations, follow
from flax_mesh.program.program import program_of

X = np.ones((3, 2), np.float32)


def trace(fn, *args):
    return program_of(jax.make_jaxpr(fn)(*args))


def flows(fn, *args):
    program = trace(fn, *args)
    return follow(program, [f"in{i}" for i in range(len(program.inputs))], Flow()).outputs


def custom_vjp(fn):
    called = jax.custom_vjp(fn)
    called.defvjp(lambda x, y: (fn(x, y), None), lambda _, g: (g[0], g[1]))
    return called


def custom_jvp(fn):
    called = jax.custom_jvp(fn)
    called.defjvp(lambda primals, tangents: (fn(*primals), fn(*tangents)))
    return called


def scanned(fn):
    """`fn` as the carry of a scan: its first result, which changes, and its second one, which stays."""
    step = lambda carry, _: (fn(*carry), None)  # noqa: E731
    return lambda x, y: tuple(jax.lax.scan(step, (x, y), None, length=2)[0])


def in_rows(fn):
    """`fn` of the rows of both arguments."""
    return lambda x, y: jax.lax.scan(lambda c, rows: (c, fn(*rows)), 0.0, (x, y))[1]


def looped(fn):
    return lambda x, y: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, *fn(*c[1:])), (0, x, y))[1:]


def branched(fn):
    return lambda x, y: jax.lax.cond(True, fn, lambda x, y: (x, y), x, y)


def sharded(fn):
    return lambda x, y: jax.shard_map(fn, mesh=create_mesh((8,), ("data",)), in_specs=P(), out_specs=P())(x, y)


# A kind of body -> whether a value that it returns unchanged is the argument.
BODIES = {jax.jit: True, jax.checkpoint: True, custom_jvp: True, custom_vjp: True, scanned: True, looped: True}
BODIES |= {in_rows: True, branched: True, sharded: False}
NESTED = [*((kind,) for kind in BODIES), *itertools.product(BODIES, repeat=2)]
NESTED.remove((sharded, sharded))  # JAX has no nested shard_map over the same axes


def step(x, y):
    return x + 1, y


@pytest.mark.parametrize("kinds", NESTED, ids=lambda kinds: " of ".join(kind.__name__ for kind in kinds))
def test_facts_pass_through_every_body(kinds):
    fn = step
    for kind in reversed(kinds):
        fn = kind(fn)
    x = np.ones((2,) * (1 + len(kinds)), np.float32)
    kept = all(BODIES[kind] for kind in kinds)
    assert flows(fn, x, x) == [DEPENDS, "in1" if kept else DEPENDS]
    program = trace(fn, x, x)
    assert follow(program, ["x", None], Flow()).outputs == [DEPENDS, None], "y depends on nothing"
    assert {"add"} <= {eqn.primitive.name for eqn in all_equations(program.eqns)}


CASES = {
    "an input": (lambda x, y: (y, x), ["in1", "in0"]),
    "a copy by arithmetic": (lambda x, y: (x * 1.0, jnp.ones_like(y)), [DEPENDS, None]),
    "a scan of other rows": (lambda x, y: jax.lax.scan(lambda c, row: (row, (c, y)), x[0], x), [DEPENDS] * 3),
    "a row of an outer scan": (
        lambda x, y: jax.lax.scan(lambda c, row: (c, jax.lax.scan(lambda c, z: (c, row), 0.0, y)[1]), 0.0, x)[1],
        [DEPENDS],
    ),
    "carries that change places": (
        lambda x, y: jax.lax.scan(lambda c, row: ((c[0], c[2], c[1], c[3] + row), None), (x, x, y, y[0]), y)[0],
        ["in0", DEPENDS, DEPENDS, DEPENDS],
    ),
    "a dependence after three iterations": (
        lambda x, y: jax.lax.scan(lambda c, _: ((c[1], c[2], x[0, 0]), None), (0.0, 0.0, 0.0), None, length=3)[0],
        [DEPENDS] * 3,
    ),
    "a number of iterations": (
        lambda x, y: jax.lax.while_loop(lambda c: c[0] < x.sum(), lambda c: (c[0] + 1, c[1]), (0, y)),
        [DEPENDS, "in1"],
    ),
    "branches": (
        lambda x, y: jax.lax.cond(True, lambda x, y: (x, y, 0), lambda x, y: (x, x, 1), x, y),
        ["in0", DEPENDS, None],
    ),
    "a chosen branch": (lambda x, y: jax.lax.cond(x.sum() > 0, lambda: (x, 0), lambda: (x, 1)), ["in0", DEPENDS]),
}


@pytest.mark.parametrize("name", CASES)
def test_dependence_and_identity(name):
    fn, expected = CASES[name]
    assert flows(fn, X, X) == expected


def test_facts_inside_of_a_body_are_found_by_its_path():
    """The body of a function that is called twice is one jaxpr, with other facts in each call."""
    called = jax.jit(lambda x: x + 1)
    program = trace(lambda x, y: called(x) + called(y), X, X)
    facts = follow(program, ["x", None], Flow())
    inside = [facts.of(eqn.params["jaxpr"].jaxpr.outvars[0], ((id(eqn), 0),)) for eqn in program.eqns[:2]]
    assert inside == [DEPENDS, None]
    assert facts.of(program.eqns[0].outvars[0]) == DEPENDS


def test_the_time_of_nested_loops_is_linear_in_their_depth():
    class Counting(Flow):
        def __init__(self):
            self.visits = 0

        def through(self, eqn, facts):
            self.visits += 1
            return super().through(eqn, facts)

    def nested(depth, x):
        """In each loop, the result of the inner one is the first variable after three iterations."""
        if depth == 0:
            return x + 1.0
        step = lambda c, _: ((c[1], c[2], c[3], nested(depth - 1, c[0])), None)  # noqa: E731
        return jax.lax.scan(step, (x, 0.0, 0.0, 0.0), None, length=4)[0][0]

    visits = []
    for depth in (2, 4, 6):
        rules = Counting()
        assert follow(trace(lambda x: nested(depth, x), 1.0), ["x"], rules).outputs == [DEPENDS]  # noqa: B023
        visits.append(rules.visits)
    assert visits[2] - visits[1] == visits[1] - visits[0] < 10
