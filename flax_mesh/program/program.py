"""Traced programs (jaxprs): how they are traced and read, with the programs in their equations, the bodies.

`bodies_of` is for walks through all kinds of bodies. To evaluate one kind, there are views of the parameters:

    names                             view                a body is evaluated
    JIT, REMAT, CUSTOM, SHARD_MAP     body(eqn)           once, on all inputs
    SCAN                              scan_parts(eqn)     once per row of the scanned inputs
    WHILE                             bodies_of(eqn)      while its test holds
    COND                              bodies_of(eqn)      once, one of them, on the inputs after the index

Other equations have bodies too, such as the sum of a scatter and the kernel of a Pallas call; `bodies` finds them all.
"""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np
from jax import core
from jax.extend import core as jex
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.typing import ArrayLike

from flax_mesh.jax_compat import JIT as JIT
from flax_mesh.jax_compat import REMAT as REMAT
from flax_mesh.jax_compat import empty_debug_info, scan_sizes
from flax_mesh.text import array_text, listed
from flax_mesh.tree import is_key

Var: TypeAlias = Any  # jex.Var; the shapes and dtypes of its avals are not typed in JAX
Eqn: TypeAlias = Any  # jex.JaxprEqn
Atom: TypeAlias = Any  # Var or jex.Literal
T = TypeVar("T")

CUSTOM = ("custom_jvp_call", "custom_vjp_call")  # functions with a derivative that the user defines
CALLS = (*JIT, *REMAT, *CUSTOM)  # of which the results are the outputs of the body for the same inputs
SCAN, WHILE, COND, SHARD_MAP = "scan", "while", "cond", "shard_map"
LINEAR_SOLVE = "custom_linear_solve"


class Program(NamedTuple):
    """A traced function: the equations from `inputs` to `outputs`. `consts` are the arrays that it closes over."""

    eqns: tuple[Eqn, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]
    consts: Mapping[Var, ArrayLike]

    def call(self, *args: Any) -> list[Any]:
        """Evaluate the program on one value per input. Inside a trace, the equations become part of the trace."""
        names, debug_info = tuple(self.consts), empty_debug_info()
        jaxpr = jex.Jaxpr(names, self.inputs, self.outputs, self.eqns, debug_info=debug_info)
        return core.eval_jaxpr(jaxpr, tuple(self.consts.values()), *map(with_axes_of, self.inputs, args))


def with_axes_of(v: Var, x: Any) -> Any:
    """`x` with the axis types of `v`: another program may have returned it on Auto axes."""
    wanted, actual = v.aval.sharding.mesh, jax.typeof(x).sharding.mesh
    if wanted.empty or actual.empty or wanted.axis_types == actual.axis_types:
        return x
    return jax.sharding.reshard(x, v.aval.sharding)


def is_var(atom: Atom) -> bool:
    """Whether an atom of a jaxpr is a variable. Otherwise it is a literal."""
    return isinstance(atom, jex.Var)


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The variables in `atoms`, without duplicates, in order."""
    return list(dict.fromkeys(atom for atom in atoms if is_var(atom)))


def trace(fn: Callable[..., Any], *args: Any) -> tuple[Program, Any]:
    """Trace `fn` on arrays or ShapeDtypeStructs. Returns its program and the pytree of its output shapes.

    Raises a ValueError if `fn` uses values that an earlier trace left.
    """
    meshes = [x.sharding.mesh for x in jax.tree.leaves(args) if _is_on_mesh(x)]
    explicit = next((mesh.abstract_mesh for mesh in meshes if has_explicit_axes(mesh)), None)
    if explicit is None:
        args = jax.tree.map(lambda x: x.update(sharding=None) if isinstance(x, jax.ShapeDtypeStruct) else x, args)
    # Values without a mesh in their type take it from the context.
    with jax.sharding.use_abstract_mesh(explicit) if explicit is not None else contextlib.nullcontext():
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    if kept := [array_text(c) for c in closed.consts if isinstance(c, core.Tracer)]:
        raise ValueError(
            f"the loss function must not keep values of an earlier trace, but it uses {listed(dict.fromkeys(kept))} of "
            "one. A table of functools.lru_cache or an attribute of a module may keep them: compute it with NumPy, or "
            "inside of `with jax.ensure_compile_time_eval():`."
        )
    # A jax.Array is placed on a device, but the program may run on others. Numpy arrays can be used on any device.
    program = program_of(closed)
    consts = {v: np.asarray(c) if isinstance(c, jax.Array) and not is_key(c) else c for v, c in program.consts.items()}
    return program._replace(consts=consts), shape


def shape_of(x: Any, shape: Sequence[int] | None = None) -> jax.ShapeDtypeStruct:
    """The type of an array or of the aval of a variable, with another shape if `shape` is given.

    On a mesh with Explicit axes the sharding belongs to the type: programs are traced with it again. In such a program
    `jax.sharding.auto_axes` makes values on Auto axes.
    """
    shape = x.shape if shape is None else tuple(shape)
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding if _is_on_mesh(x) else None)


def has_explicit_axes(mesh: Mesh | AbstractMesh | None) -> bool:
    """Whether the shardings of arrays on `mesh`, which may be None, belong to their types."""
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def bodies(eqn: Eqn) -> list[jex.Jaxpr]:
    """Every jaxpr among the parameters of any equation, for a search."""
    params = [value if isinstance(value, tuple | list) else (value,) for value in eqn.params.values()]
    jaxprs = [x for items in params for x in items if isinstance(x, jex.ClosedJaxpr | jex.Jaxpr)]
    return [x.jaxpr if isinstance(x, jex.ClosedJaxpr) else x for x in jaxprs]


def with_inputs(program: Program, inputs: Sequence[Var]) -> Program:
    """The program with other variables as inputs."""
    names = dict(zip(program.inputs, inputs, strict=True))

    def renamed(atoms: Iterable[Atom]) -> list[Atom]:
        return [names.get(atom, atom) if is_var(atom) else atom for atom in atoms]

    eqns = tuple(eqn.replace(invars=renamed(eqn.invars)) for eqn in program.eqns)
    return Program(eqns, tuple(inputs), tuple(renamed(program.outputs)), program.consts)


def needed(eqns: Sequence[Eqn], required: Iterable[Atom], effects: bool = True) -> tuple[list[int], list[Var]]:
    """Returns (indices of the equations that `required` depends on, `required` and the inputs of these equations).

    With `effects`, equations with side effects are always included.
    """
    live, kept = dict.fromkeys(variables(required)), list[int]()
    for index in reversed(range(len(eqns))):
        eqn = eqns[index]
        if (effects and eqn.effects) or any(out in live for out in eqn.outvars):
            kept.append(index)
            live |= dict.fromkeys(variables(eqn.invars))
    return kept[::-1], list(live)


def flops(eqn: Eqn) -> int:
    """Floating-point operations of an equation: 2 per multiply-add, otherwise 1 per element of the result.

    A scan counts its body once per iteration, a cond its most expensive branch. A while loop counts its body once,
    since the number of iterations is unknown.
    """
    name = eqn.primitive.name
    size = math.prod(eqn.outvars[0].aval.shape) if eqn.outvars else 0
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * size * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
    if name == "ragged_dot_general":
        # Every row is multiplied with the matrix of its group. If the rows are contracted, so with one result per
        # group, every group contracts only its rows.
        ragged = eqn.params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = ragged.dot_dimension_numbers
        groups = eqn.invars[2].aval.shape[-1] if set(ragged.lhs_ragged_dimensions) & set(contracted) else 1
        return 2 * size * math.prod(eqn.invars[0].aval.shape[d] for d in contracted) // groups
    if name == "triangular_solve":
        a, b = (v.aval.shape for v in eqn.invars)
        return math.prod(b) * a[-1]
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * size * math.prod(kernel) // out_features
    inner = [sum(map(flops, body.eqns)) for body in bodies(eqn)]
    if inner:
        return max(inner) * eqn.params.get("length", 1) if name in ("scan", "cond") else sum(inner)
    return size


def program_of(inner: jex.ClosedJaxpr | jex.Jaxpr) -> Program:
    """The program of a jaxpr, closed or not."""
    jaxpr, consts = (inner.jaxpr, inner.consts) if isinstance(inner, jex.ClosedJaxpr) else (inner, ())
    names = dict(zip(jaxpr.constvars, consts, strict=True))
    return Program(tuple(jaxpr.eqns), tuple(jaxpr.invars), tuple(jaxpr.outvars), names)


def _is_on_mesh(x: object) -> bool:
    sharding = getattr(x, "sharding", None)
    return isinstance(sharding, NamedSharding) and not sharding.mesh.empty


class Scan(NamedTuple):
    """A loop over rows: the body maps constants, carry and a row of every scanned input to carry and stacked rows."""

    body: Program
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int

    def run(self, step: Callable[[Any, Any], tuple[Any, Any]], start: Any, rows: Any) -> tuple[Any, Any]:
        """`jax.lax.scan` over as many rows in the same order."""
        return jax.lax.scan(step, start, rows, length=self.length, reverse=self.reverse, unroll=self.unroll)

    def inputs(self, values: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """(constants, carry, scanned inputs) of one value per input of the equation or of the body."""
        start_rows = self.num_consts + self.num_carry
        return [*values[: self.num_consts]], [*values[self.num_consts : start_rows]], [*values[start_rows:]]

    def outputs(self, values: Sequence[T]) -> tuple[list[T], list[T]]:
        """(carry, stacked outputs) of one value per output of the equation or of the body."""
        return [*values[: self.num_carry]], [*values[self.num_carry :]]


def scan_parts(eqn: Eqn) -> Scan:
    params = eqn.params
    return Scan(program_of(params["jaxpr"]), *scan_sizes(eqn), params["length"], params["reverse"], params["unroll"])


def body(eqn: Eqn) -> Program:
    """The body of an equation whose name is in JIT, REMAT, CUSTOM, or SHARD_MAP (with the values of one device)."""
    return program_of(eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"])


def shard_map_options(eqn: Eqn) -> Mapping[str, Any]:
    """Arguments of `jax.shard_map`."""
    options = {name: eqn.params[name] for name in ("mesh", "in_specs", "out_specs", "check_vma")}
    return options | {"axis_names": eqn.params["newly_manual_axes"]}


class Body(NamedTuple):
    program: Program
    at: Sequence[int]  # for each input of the program, the number of the input of the equation


class Bodies(NamedTuple):
    """The bodies of an equation. The inputs of it that are not listed here are the same values in its bodies."""

    all: Sequence[Body]  # of a while, the body and the test
    carry: Sequence[int] = ()  # the inputs that are variables of a loop; the first outputs are their last values
    rows: Sequence[int] = ()  # the inputs of which a body sees a row, or the part of one device
    chooses: Sequence[int] = ()  # the input that chooses a branch


def bodies_of(eqn: Eqn) -> Bodies:
    """Of an equation whose name is in CALLS, SCAN, WHILE, COND or SHARD_MAP; no bodies of any other."""
    name, inputs = eqn.primitive.name, range(len(eqn.invars))
    if name == SCAN:
        scan = scan_parts(eqn)
        return Bodies([Body(scan.body, inputs)], *scan.inputs(inputs)[1:])
    if name == WHILE:
        test, repeated = (program_of(eqn.params[key]) for key in ("cond_jaxpr", "body_jaxpr"))
        of_test = eqn.params["cond_nconsts"]
        carry = inputs[of_test + eqn.params["body_nconsts"] :]
        return Bodies([Body(repeated, inputs[of_test:]), Body(test, [*inputs[:of_test], *carry])], carry)
    if name == COND:
        return Bodies([Body(program_of(branch), inputs[1:]) for branch in eqn.params["branches"]], chooses=[0])
    if name in (*CALLS, SHARD_MAP):
        return Bodies([Body(body(eqn), inputs)], rows=inputs if name == SHARD_MAP else ())
    return Bodies([])
