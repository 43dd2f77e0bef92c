"""Loss and gradients of a function in blocks or in a kernel, compared with the function as it is; planted mistakes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

from flax_mesh.blockwise import loops, transform
from flax_mesh.blockwise.masks import visits
from flax_mesh.kernels import KERNELS
from flax_mesh.program.program import program_of
from tests.mpmd.zoo.base import FAST


def scalar_of(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """(function of the arrays of floats among `args`, these arrays): a random combination of all results."""
    leaves, tree = jax.tree.flatten(tuple(args))
    at = [n for n, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def scalar(floats: Sequence[Any]) -> Any:
        given = dict(zip(at, floats, strict=True))
        results = jax.tree.leaves(fn(*jax.tree.unflatten(tree, [given.get(n, x) for n, x in enumerate(leaves)])))
        weights = [np.random.default_rng(5).normal(size=x.shape).astype(np.float32) for x in results]
        return sum(jnp.sum(x.astype(jnp.float32) * w) for x, w in zip(results, weights, strict=True))

    return scalar, [leaves[n] for n in at]


def gradients(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[list[np.ndarray], jex.Jaxpr]:
    """(the loss and its gradients, each as a flat array, the program that computes them)."""
    scalar, floats = scalar_of(fn, args)
    closed = jax.make_jaxpr(jax.value_and_grad(scalar))(floats)
    options = FAST if jax.default_backend() == "cpu" else None
    found = jax.jit(jex.jaxpr_as_fun(closed), compiler_options=options)(*floats)
    return [np.asarray(x, np.float64).ravel() for x in found], closed.jaxpr


def apart(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest relative difference between the losses and between the gradients of each argument."""
    size = max(np.linalg.norm(x) for x in expected)
    pairs = zip(found, expected, strict=True)
    # np.max, since max drops a NaN that is not the first.
    return float(np.max([np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-2 * size, 1e-9) for x, y in pairs]))


def difference(fn: Callable[..., Any], other: Callable[..., Any], args: Sequence[Any]) -> float:
    return apart(gradients(other, args)[0], gradients(fn, args)[0])


def largest_square(jaxpr: Any, length: int) -> int:
    """The most elements of an array of a jaxpr with two dims of `length`."""
    most, stack = 0, [jaxpr]
    while stack:
        for eqn in stack.pop().eqns:
            sizes = [v.aval.size for v in eqn.outvars if [*getattr(v.aval, "shape", ())].count(length) >= 2]
            most = max([most, *sizes])
            for value in eqn.params.values():
                each = value if isinstance(value, tuple | list) else (value,)
                stack += [inner for x in each if hasattr(inner := getattr(x, "jaxpr", x), "eqns")]
    return most


def square_of_gradient(fn: Callable[..., Any], args: Sequence[Any], length: int) -> int:
    scalar, floats = scalar_of(fn, args)
    return largest_square(jax.make_jaxpr(jax.grad(scalar))(floats).jaxpr, length)


def rewritten(
    fn: Callable[..., Any], args: Sequence[Any], kernel: str, block: int = 64, platform: str = "cpu"
) -> transform.Rewritten:
    """A function of arrays whose attention is in a kernel for `platform`; on CPUs, its reference computes it."""
    program, count = program_of(jax.make_jaxpr(fn)(*args)), len(jax.tree.leaves(args))
    options = {"block": block, "kernel": kernel, "platform": platform}
    return transform.rewrite(program, [None] * count, lambda _: None, **options)


def with_kernel(fn: Callable[..., Any], kernel: str, block: int = 64, platform: str = "cpu") -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        found = rewritten(fn, args, kernel, block, platform)
        assert found.call is not None and KERNELS[kernel].title in found.lines[0], found
        return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(fn, *args)), found.call(*jax.tree.leaves(args)))

    return call


PLANTED = {  # mistake -> a program that finds it
    "log-sum-exp in one number": "empty_rows_finite",
    "a skipped block of a finite mask": "empty_rows_finite",
    "a bound that is off by one": "causal",
}


def plant(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "log-sum-exp in one number":
        forward = loops.Loops.forward

        def joined(self: Any, *args: Any) -> Any:
            out, saved = forward(self, *args)
            return out, saved._replace(maximum=saved.maximum + jnp.log(saved.total), total=jnp.ones_like(saved.total))

        monkeypatch.setattr(loops.Loops, "forward", joined)
    elif mistake == "a skipped block of a finite mask":
        monkeypatch.setattr(loops, "GAP", -np.inf)
    else:
        assert mistake == "a bound that is off by one"
        high_of = visits._high

        def of_the_next_block(*args: Any) -> Any:
            high = high_of(*args)
            return visits.module_of(high).roll(high, -1, 1)

        monkeypatch.setattr(visits, "_high", of_the_next_block)
