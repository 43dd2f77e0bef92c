"""Evaluates and rewrites jaxprs. All calls of the pipeline to JAX's semi-public interpreter are in this file."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.extend import core as jex
from jax.sharding import AxisType, NamedSharding
from jax.tree_util import DictKey

from flax_mesh.jax_compat import JIT, REMAT, empty_debug_info, evaluate, in_source_of, scan_sizes
from flax_mesh.text import array_text, listed
from flax_mesh.tree import is_key

Var: TypeAlias = Any  # jex.Var; the shapes and dtypes of its avals are not typed in JAX
Eqn: TypeAlias = Any  # jex.JaxprEqn
# Primitives that compute each element independently, so they can run on every chunk of a stack.
ELEMENTWISE = frozenset(
    """abs add add_any and atan2 cbrt ceil clamp convert_element_type copy cos cosh div eq erf exp exp2 expm1 floor ge
    gt integer_pow is_finite le log log1p log2 logistic lt max min mul ne neg nextafter not one_minus_square or pow real
    name reduce_precision rem round rsqrt select_n sign sin sinh sqrt square stop_gradient sub tan tanh
    xor""".split()  # noqa: SIM905
)
REDUCE = {"reduce_sum": jnp.add, "reduce_max": jnp.maximum, "reduce_min": jnp.minimum}
REDUCE |= {"reduce_and": jnp.logical_and, "reduce_or": jnp.logical_or}

_BY_ROW = {"dot_general", "transpose", "reshape", "broadcast_in_dim"}  # these may keep the rows of a stack apart


class Program(NamedTuple):
    """A traced function: the equations from `inputs` to `outputs`. `consts` are the arrays that it closes over."""

    eqns: tuple[Eqn, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Any, ...]  # Var or Literal
    consts: Mapping[Var, Any]

    def call(self, *args: Any) -> list[Any]:
        """Evaluate the program on one value per input. Inside a trace, the equations become part of the trace."""
        names = tuple(self.consts)
        jaxpr = _jaxpr(names, self.inputs, self.outputs, self.eqns)
        return core.eval_jaxpr(jaxpr, tuple(self.consts.values()), *map(with_axes_of, self.inputs, args))


def with_axes_of(v: Var, x: Any) -> Any:
    """`x` with the axis types of `v`: another program may have returned it on Auto axes."""
    wanted, actual = v.aval.sharding.mesh, jax.typeof(x).sharding.mesh
    if wanted.empty or actual.empty or wanted.axis_types == actual.axis_types:
        return x
    return jax.sharding.reshard(x, v.aval.sharding)


def is_var(atom: Any) -> bool:
    """Whether an atom of a jaxpr is a variable. Otherwise it is a literal."""
    return isinstance(atom, jex.Var)


def variables(atoms: Iterable[Any]) -> list[Var]:
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
    consts = [np.asarray(c) if isinstance(c, jax.Array) and not is_key(c) else c for c in closed.consts]
    return _program(closed.jaxpr, consts), shape


def shape_of(x: Any, shape: Sequence[int] | None = None) -> jax.ShapeDtypeStruct:
    """The type of an array or of the aval of a variable, with another shape if `shape` is given.

    On a mesh with Explicit axes the sharding belongs to the type: programs are traced with it again. In such a program
    `jax.sharding.auto_axes` makes values on Auto axes.
    """
    shape = x.shape if shape is None else tuple(shape)
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding if _is_on_mesh(x) else None)


def has_explicit_axes(mesh: Any) -> bool:
    """Whether the shardings of arrays on `mesh`, which may be None, belong to their types."""
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def bodies(eqn: Eqn) -> list[Any]:
    params = [value if isinstance(value, tuple | list) else (value,) for value in eqn.params.values()]
    jaxprs = [x for items in params for x in items if isinstance(x, jex.ClosedJaxpr | jex.Jaxpr)]
    return [x.jaxpr if isinstance(x, jex.ClosedJaxpr) else x for x in jaxprs]


@jax.tree_util.register_pytree_with_keys_class
class Chunks:
    """A leaf of a scanned stack, split along its leading layer dim into `parts`. Part i starts at layer `starts[i]`."""

    def __init__(self, parts: Iterable[Any], starts: Iterable[int]):
        self.parts, self.starts = tuple(parts), tuple(starts)

    @property
    def sizes(self) -> list[int]:
        return [part.shape[0] for part in self.parts]

    def whole(self) -> Any:
        return self.parts[0] if len(self.parts) == 1 else jnp.concatenate(self.parts, 0)

    def tree_flatten_with_keys(self):
        return [(DictKey(f"from {s}"), part) for s, part in zip(self.starts, self.parts, strict=True)], self.starts

    def tree_flatten(self):
        return self.parts, self.starts

    @classmethod
    def tree_unflatten(cls, starts: tuple[int, ...], parts: Iterable[Any]) -> "Chunks":
        return cls(parts, starts)


class Periods(NamedTuple):
    """Chunks of layers (L, ...), reshaped to rows of `period` layers, (L / period, period, ...).

    Some rows are in several chunks, so they are no Chunks themselves. Only a scan takes them, others take the whole.
    """

    chunks: Chunks
    period: int

    @property
    def starts(self) -> tuple[int, ...]:
        """The first row of each range of rows in one chunk, and of each row in several chunks."""
        ends = [start + size for start, size in zip(self.chunks.starts, self.chunks.sizes, strict=True)]
        cuts = {0, *(end // self.period for end in ends), *(-(-end // self.period) for end in ends)}
        return tuple(sorted(cuts)[:-1])

    @property
    def sizes(self) -> list[int]:
        stop = sum(self.chunks.sizes) // self.period
        return [b - a for a, b in pairwise([*self.starts, stop])]

    def rows(self) -> list[Any]:
        """One item per range: an array of its rows, or Chunks of the single layers of a row in several chunks."""
        inside = [start for start in self.chunks.starts if start % self.period]
        shared = [any(start // self.period == first for start in inside) for first in self.starts]
        counts = [[1] * self.period if s else [n * self.period] for s, n in zip(shared, self.sizes, strict=True)]
        pieces = iter(_split_chunks(self.chunks, [n for each in counts for n in each]))
        rows = [[whole(next(pieces)) for _ in each] for each in counts]
        return [
            Chunks(each, range(self.period)) if s else each[0].reshape(-1, self.period, *each[0].shape[1:])
            for s, each in zip(shared, rows, strict=True)
        ]

    def whole(self) -> Any:
        layers = self.chunks.whole()
        return layers.reshape(-1, self.period, *layers.shape[1:])


def interpret(program: Program, args: Sequence[Any], opens: Callable[[Eqn], bool] = lambda eqn: False) -> list[Any]:
    """Evaluate `program` with every jit inlined, and also each remat and cond for which `opens` returns True.

    Arguments and outputs may be Chunks: a scan over Chunks becomes one scan per chunk, and an elementwise equation one
    equation per chunk. An opened cond evaluates all branches and selects the result. An output may also be Periods.
    """

    def outputs_of(eqn: Eqn, values: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name in JIT or (name in REMAT and opens(eqn)):
            return interpret(body(eqn), values, opens)
        if name == "cond" and opens(eqn):
            sides = [interpret(program_of(branch), values[1:], opens) for branch in eqn.params["branches"]]
            return [_select(values[0], each) for each in zip(*sides, strict=True)]
        if any(isinstance(value, Chunks | Periods) for value in values):
            with in_source_of(eqn):  # errors name the line that combines several layers
                return _on_chunks(eqn, values)
        return evaluate(eqn, values)

    return evaluate_with(program, args, outputs_of)


def evaluate_with(program: Program, args: Sequence[Any], outputs_of: Callable[..., list[Any]]) -> list[Any]:
    """Evaluate `program` with `outputs_of(eqn, values)` in the place of every equation."""
    env = dict(program.consts) | dict(zip(program.inputs, args, strict=True))
    for eqn in program.eqns:
        values = [env[atom] if is_var(atom) else atom.val for atom in eqn.invars]
        env.update(zip(eqn.outvars, outputs_of(eqn, values), strict=True))
    return [env[atom] if is_var(atom) else atom.val for atom in program.outputs]


def inline(program: Program, opens: Callable[[Eqn], bool] = lambda eqn: False) -> Program:
    """The same program without nested jits, and without the remats and conds for which `opens` returns True."""
    if not any(eqn.primitive.name in JIT or opens(eqn) for eqn in program.eqns):
        return program
    shapes = [shape_of(v.aval) for v in program.inputs]
    return trace(lambda *args: interpret(program, args, opens), *shapes)[0]


def needed(eqns: Sequence[Eqn], required: Iterable[Any], effects: bool = True) -> tuple[list[int], list[Var]]:
    """Returns (indices of the equations that `required` depends on, `required` and the inputs of these equations).

    With `effects`, equations with side effects are always included.
    """
    live, kept = dict.fromkeys(variables(required)), []
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
    inner = [sum(flops(e) for e in body.eqns) for body in bodies(eqn)]
    if inner:
        return max(inner) * eqn.params.get("length", 1) if name in ("scan", "cond") else sum(inner)
    return size


def body(eqn: Eqn) -> Program:
    """The program of a jit or remat equation."""
    return program_of(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"])


def whole(value: Any) -> Any:
    """The value itself, with Chunks concatenated."""
    return value.whole() if isinstance(value, Chunks | Periods) else value


def rows_of(value: Any, ranges: Sequence[tuple[int, int] | None]) -> list[Any]:
    """The layers [first, stop) of a stack for all of its `ranges`, in order; None is the entire value."""
    if isinstance(value, Chunks) and None not in ranges:
        return [whole(piece) for piece in _split_chunks(value, [r[1] - r[0] for r in ranges if r])]
    value = whole(value)
    return [value if r is None else value[slice(*r)] for r in ranges]


def closed_of(program: Program) -> jex.ClosedJaxpr:
    """The program as a jaxpr of JAX."""
    jaxpr = _jaxpr(tuple(program.consts), program.inputs, program.outputs, program.eqns)
    return jex.ClosedJaxpr(jaxpr, tuple(program.consts.values()))


def _jaxpr(consts: Sequence[Var], inputs: Sequence[Var], outputs: Sequence[Any], eqns: Sequence[Eqn]) -> jex.Jaxpr:
    return jex.Jaxpr(consts, inputs, outputs, eqns, debug_info=empty_debug_info())


def program_of(inner: Any) -> Program:
    """The program of a jaxpr, closed or not."""
    return _program(inner.jaxpr, inner.consts) if isinstance(inner, jex.ClosedJaxpr) else _program(inner, ())


def _program(jaxpr: jex.Jaxpr, consts: Sequence[Any]) -> Program:
    names = dict(zip(jaxpr.constvars, consts, strict=True))
    return Program(tuple(jaxpr.eqns), tuple(jaxpr.invars), tuple(jaxpr.outvars), names)


def _select(index: Any, values: Sequence[Any]) -> Any:
    chunks = next((v for v in values if isinstance(v, Chunks)), None)
    if chunks is None:
        return jax.lax.select_n(index, *map(whole, values))
    rows = [_rows(v, chunks) for v in values]
    return Chunks((jax.lax.select_n(index, *part) for part in zip(*rows, strict=True)), chunks.starts)


def _on_chunks(eqn: Eqn, values: Sequence[Any]) -> list[Any]:
    """Evaluate an equation with Chunks as inputs. Concatenates them only if it cannot run on each chunk."""
    name = eqn.primitive.name
    if name == "scan":
        return _scan_chunks(eqn, values)
    values = [whole(value) if isinstance(value, Periods) else value for value in values]
    chunks = next((v for v in values if isinstance(v, Chunks)), None)
    if chunks is None:
        return evaluate(eqn, values)
    if name == "split" and eqn.params["axis"] == 0:
        return _split_chunks(chunks, eqn.params["sizes"])
    if name == "slice" and (sizes := _sizes_around_rows(eqn)):
        return [_split_chunks(chunks, sizes)[1]]
    if name == "reshape" and (period := _period_of(eqn, chunks)):
        return [Periods(chunks, period)]
    if name in _BY_ROW and (result := _by_row(eqn, values, chunks)):
        return [result]
    if name in REDUCE and 0 in eqn.params["axes"]:
        parts = [evaluate(eqn, [part])[0] for part in chunks.parts]
        return [functools.reduce(REDUCE[name], parts)]
    # This REDUCE does not reduce over layers, and a reshard of the other dims keeps every layer where it is.
    if name in ELEMENTWISE or name in REDUCE or (name == "reshard" and not any(eqn.params["dst_sharding"].spec[:1])):
        rows = [_rows(v, chunks) for v in values]
        return [Chunks((evaluate(eqn, part)[0] for part in zip(*rows, strict=True)), chunks.starts)]
    return evaluate(eqn, [whole(value) for value in values])


def _split_chunks(chunks: Chunks, sizes: Sequence[int]) -> list[Chunks]:
    """Consecutive ranges of the layers; a part that is in several of them is split."""
    stops = [*accumulate(sizes)]
    pieces: list[tuple[list[Any], list[int]]] = [([], []) for _ in sizes]
    for start, part in zip(chunks.starts, chunks.parts, strict=True):
        lows, highs = ([min(max(x, start), start + part.shape[0]) for x in at] for at in ([0, *stops[:-1]], stops))
        among = [k for k, (low, high) in enumerate(zip(lows, highs, strict=True)) if low < high]
        split = [part] if len(among) == 1 else jax.lax.split(part, [highs[k] - lows[k] for k in among])
        for k, rows in zip(among, split, strict=True):
            pieces[k][0].append(rows)
            pieces[k][1].append(lows[k] - (stops[k] - sizes[k]))
    return [Chunks(*piece) for piece in pieces]


def _sizes_around_rows(eqn: Eqn) -> tuple[int, int, int] | None:
    """The layers before, in and after those that a slice takes; None if it takes none, or parts of them."""
    first, *starts = eqn.params["start_indices"]
    stop, *limits = eqn.params["limit_indices"]
    depth, *shape = eqn.invars[0].aval.shape
    apart = any(starts) or limits != shape or any(x != 1 for x in eqn.params["strides"] or ())
    return None if apart or first >= stop else (first, stop - first, depth - stop)


def _period_of(eqn: Eqn, chunks: Chunks) -> int | None:
    """The period of a reshape (L, ...) -> (L / period, period, ...) with a row of layers in several chunks, or None."""
    (depth, *inner), (count, *out) = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape or (1,)
    if eqn.params["sharding"] is not None or eqn.params["dimensions"] is not None:
        return None
    if not out or list(out[1:]) != inner or count * out[0] != depth:
        return None
    return out[0] if any(start % out[0] for start in chunks.starts) else None


def _by_row(eqn: Eqn, values: Sequence[Any], chunks: Chunks) -> Chunks | None:
    """Evaluate an equation that keeps the rows of the stack apart, one chunk at a time; None if it mixes them.

    So Muon's products of the matrices of a stack run on the group of each. A reshape may merge the layer dim with the
    next one, as (layers, experts, ...) -> (layers * experts, ...), or undo that.
    """
    name, params, out = eqn.primitive.name, eqn.params, eqn.outvars[0].aval
    if params.get("sharding") is not None or params.get("out_sharding") is not None:
        return None  # Explicit axes: the result must have one sharding
    if name == "dot_general":
        (_, _), batch = params["dimension_numbers"]
        if any(dims[:1] != (0,) for dims in map(tuple, batch)):
            return None
        rows = [_rows(value, chunks) for value in values]
        return Chunks((evaluate(eqn, part)[0] for part in zip(*rows, strict=True)), chunks.starts)
    if name == "transpose":
        is_apart = params["permutation"][0] == 0
        return Chunks((evaluate(eqn, [x])[0] for x in chunks.parts), chunks.starts) if is_apart else None
    if name == "broadcast_in_dim":
        count = sum(part.shape[0] for part in chunks.parts)
        if params["broadcast_dimensions"][:1] != (0,) or out.shape[0] != count:
            return None
        shapes = [(x.shape[0], *out.shape[1:]) for x in chunks.parts]
        parts = zip(chunks.parts, shapes, strict=True)
        dims = params["broadcast_dimensions"]
        return Chunks((jax.lax.broadcast_in_dim(x, shape, dims) for x, shape in parts), chunks.starts)
    if params["dimensions"] is not None:
        return None
    before, after = (math.prod(shape[1:]) for shape in (eqn.invars[0].aval.shape, out.shape))
    sizes = [*chunks.starts, *(x.shape[0] for x in chunks.parts)]
    if not after or any(size * before % after for size in sizes):
        return None
    parts = (x.reshape(x.shape[0] * before // after, *out.shape[1:]) for x in chunks.parts)
    return Chunks(parts, (start * before // after for start in chunks.starts))


def _rows(value: Any, like: Chunks | Periods) -> list[Any]:
    """The rows of `value` for every chunk of `like`, those of Periods as `Periods.rows`; a scalar is repeated."""
    if isinstance(value, Chunks) and value.starts == like.starts:
        return list(value.parts)
    if isinstance(value, Periods) and value.starts == like.starts:
        return value.rows()
    value = whole(value)  # a stack that is split at other layers
    if not jnp.shape(value):
        return [value] * len(like.starts)
    return [value[s : s + size] for s, size in zip(like.starts, like.sizes, strict=True)]


def _scan_chunks(eqn: Eqn, values: Sequence[Any]) -> list[Any]:
    """One scan per chunk, each starting from the carry of the previous one. Other scanned inputs are sliced.

    Rows of Periods that are in several chunks are no scan: the body is evaluated on their layers. A scan that is
    unrolled completely, and scans nothing, is unrolled here: its carry may be Chunks.
    """
    params = dict(eqn.params)
    inner = program_of(params["jaxpr"])
    num_consts, num_carry = scan_sizes(eqn)
    if params["unroll"] >= params["length"] and len(values) == num_consts + num_carry == num_consts + len(eqn.outvars):
        carry = list(values[num_consts:])
        for _ in range(params["length"]):
            carry = interpret(inner, [*values[:num_consts], *carry])
        return carry
    consts = [whole(value) for value in values[:num_consts]]
    carry = [whole(value) for value in values[num_consts : num_consts + num_carry]]
    xs = values[num_consts + num_carry :]
    like = next((x for kind in (Periods, Chunks) for x in xs if isinstance(x, kind)), None)
    if like is None:
        return evaluate(eqn, [*consts, *carry, *xs])
    rows_of = [_rows(x, like) for x in xs]
    order = range(len(like.starts))
    ys: list[Any] = [None] * len(order)
    for k in reversed(order) if params["reverse"] else order:
        rows = [rows[k] for rows in rows_of]
        if any(isinstance(x, Chunks) for x in rows):
            layers = [x if isinstance(x, Chunks) else x[0] for x in rows]
            outs = [whole(out) for out in interpret(inner, [*consts, *carry, *layers])]
            outs[num_carry:] = [jnp.expand_dims(y, 0) for y in outs[num_carry:]]
        else:
            outs = eqn.primitive.bind(*consts, *carry, *rows, **{**params, "length": like.sizes[k]})
        carry, ys[k] = outs[:num_carry], outs[num_carry:]
    return [*carry, *(Chunks(parts, like.starts) for parts in zip(*ys, strict=True))]


def _is_on_mesh(x: Any) -> bool:
    sharding = getattr(x, "sharding", None)
    return isinstance(sharding, NamedSharding) and not sharding.mesh.empty
