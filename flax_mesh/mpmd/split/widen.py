"""Evaluates a program with float32 in the place of half-precision and 8-bit floating-point types.

Two programs that compute the same results in bfloat16 differ by its rounding errors, up to some percent, which would
hide small mistakes. Widened, they differ by the rounding errors of float32.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.extend.core import primitives

from flax_mesh.jax_compat import evaluate
from flax_mesh.mpmd.chunks import ELEMENTWISE
from flax_mesh.program.follow import all_equations
from flax_mesh.program.program import CALLS, Eqn, Program, bodies_of, body, is_var, program_of, shape_of, variables
from flax_mesh.program.rewrite import Value, rewrite

# Primitives that compute the same function for every floating-point type, and are not in jax.extend.core.primitives.
_GENERIC = ELEMENTWISE | {
    "mesh_cast",
    "optimization_barrier",
    "psum_invariant",
    "pvary",
    "ragged_dot_general",
    "reshard",
    "split",
}


def is_narrow(dtype: Any) -> bool:
    """Whether `dtype` is a floating-point type of less than 32 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def widen(x: Any) -> Any:
    """An array in float32 if its type is narrow; any other value is returned."""
    return jnp.asarray(x, jnp.float32) if hasattr(x, "dtype") and is_narrow(x.dtype) else x


def call_widened(program: Program, args: Sequence[Value]) -> list[Value]:
    """The outputs of `program` for widened arguments and constants, computed in float32 or wider types."""
    if not any(map(_is_narrow_eqn, program.eqns)):
        return program.call(*args)
    return rewrite(program, [*map(widen, args)], _rule, touches=lambda eqn, _: _is_narrow_eqn(eqn), constant=widen)


def rough_outputs(program: Program) -> list[bool]:
    """For every output, whether it depends on an equation that `call_widened` cannot widen, such as a kernel."""
    rough: set[Any] = set()
    for eqn in program.eqns:
        if _is_rough(eqn) or not rough.isdisjoint(variables(eqn.invars)):
            rough |= set(eqn.outvars)
    return [is_var(atom) and atom in rough for atom in program.outputs]


def _rule(eqn: Eqn, values: Sequence[Value]) -> Sequence[Value] | None:
    name = eqn.primitive.name
    if name in CALLS:
        return call_widened(body(eqn), values)
    if bodies_of(eqn).all:
        return None
    if name == "reduce_precision":
        return values
    if not _is_generic(eqn):
        values = [_narrowed(x, atom.aval.dtype) for x, atom in zip(values, eqn.invars, strict=True)]
        return [*map(widen, evaluate(eqn, values))]
    wide, params = jnp.dtype(jnp.float32), dict(eqn.params)
    params |= {key: wide for key, value in params.items() if isinstance(value, np.dtype) and is_narrow(value)}
    # The sum of a scatter, for example.
    params |= {key: _widened_jaxpr(x) for key, x in params.items() if isinstance(x, jex.Jaxpr | jex.ClosedJaxpr)}
    if isinstance(params.get("precision"), jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        params["precision"] = None
    return evaluate(eqn.replace(invars=[*map(_widened, eqn.invars)], params=params), values)


def _narrowed(x: Any, dtype: Any) -> Any:
    return jnp.asarray(x, dtype) if is_narrow(dtype) else x


def _widened_jaxpr(jaxpr: Any) -> Any:
    program = program_of(jaxpr)
    dtypes = [v.aval.dtype for v in program.inputs]
    wide = [jnp.float32 if is_narrow(dtype) else dtype for dtype in dtypes]
    types = [shape_of(v.aval).update(dtype=dtype) for v, dtype in zip(program.inputs, wide, strict=True)]
    widened = jax.make_jaxpr(lambda *args: call_widened(program, args))(*types)
    return widened if isinstance(jaxpr, jex.ClosedJaxpr) else widened.jaxpr


def _widened(atom: Any) -> Any:
    """An input of an equation; a narrow literal is replaced. The types of variables are not read."""
    if is_var(atom) or not is_narrow(atom.aval.dtype):
        return atom
    return jex.Literal(np.asarray(atom.val, np.float32), atom.aval.update(dtype=np.dtype(np.float32)))


def _is_generic(eqn: Eqn) -> bool:
    """Whether the primitive computes the same function in float32."""
    name = eqn.primitive.name
    return name in _GENERIC or (hasattr(primitives, f"{name.replace('-', '_')}_p") and name != "bitcast_convert_type")


def _is_rough(eqn: Eqn) -> bool:
    """Whether the equation computes with narrow values of which the last bits may differ, and cannot be widened."""
    if inner := bodies_of(eqn).all:
        return any(_is_rough(each) for body in inner for each in body.program.eqns)
    is_exact = not any(jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in eqn.invars)
    return not is_exact and not _is_generic(eqn) and _is_narrow_eqn(eqn)


def _is_narrow_eqn(eqn: Eqn) -> bool:
    """Whether a value of the equation, or of its bodies, is narrow."""
    atoms = (atom for each in all_equations([eqn]) for atom in (*each.invars, *each.outvars))
    return any(hasattr(atom.aval, "dtype") and is_narrow(atom.aval.dtype) for atom in atoms)
