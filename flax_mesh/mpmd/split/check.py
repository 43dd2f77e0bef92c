"""Compares the stages of a loss function, run one after another on one device, with the program before the split."""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flax_mesh.jax_compat import short_tracer_errors
from flax_mesh.modes import user_modes
from flax_mesh.mpmd.split.assign import CutError
from flax_mesh.mpmd.split.backward import differentiate
from flax_mesh.mpmd.split.jaxpr import Eqn, Program, Var, bodies, flops, num_bytes
from flax_mesh.mpmd.split.trace import Forward, ModelLeaf
from flax_mesh.sharding.abstract import Make, Split, made_leaves
from flax_mesh.step.loss import Batch, LossFn, run_loss
from flax_mesh.tree import PyTree, is_key, named_leaves

TOLERANCE, HALF_TOLERANCE = 1e-5, 3e-2  # of the largest value; the second one if the program has half-precision values
_ROUNDINGS = 8  # a difference is rounding if it is below this many times that of parameters rounded differently
CHEAP_FLOPS, CHEAP_BYTES = 1e10, 2**30


class Results(NamedTuple):
    """What one microbatch computes. The keys are indices of leaves of the model."""

    sums: list[Any]  # loss, weight and metrics
    variables: dict[int, jax.Array]  # new values
    gradients: dict[int, Any]


Run = Callable[..., Results]  # (values of the leaves of the model, microbatch, step, number of the microbatch)


def one_device_mesh(mesh: AbstractMesh | None) -> Mesh | None:
    """A mesh of one device of this process with the axes of `mesh`."""
    if mesh is None:
        return None
    device = np.array(jax.local_devices()[0]).reshape((1,) * len(mesh.axis_names))
    return Mesh(device, mesh.axis_names, axis_types=mesh.axis_types)


def full_precision() -> contextlib.AbstractContextManager[object]:
    """Context in which accelerators multiply float32 matrices in float32, which the tolerance requires."""
    on_cpu = jax.local_devices()[0].platform == "cpu"
    return contextlib.nullcontext() if on_cpu else jax.default_matmul_precision("highest")


def is_cheap(program: Program) -> bool:
    """Whether the forward and backward pass of `program` take less than CHEAP_FLOPS and CHEAP_BYTES.

    The backward pass counts as twice the FLOPs, and as as many bytes, as the forward pass; no value is freed.
    """
    num_flops = 3 * sum(map(flops, program.eqns))
    size = 2 * (sum(num_bytes(v.aval) for v in program.inputs) + sum(map(_bytes, program.eqns)))
    return num_flops < CHEAP_FLOPS and size < CHEAP_BYTES


class PlainModel(NamedTuple):
    """A model that is not split, and how it is trained."""

    loss_fn: LossFn
    split_model: Split  # graph definition and state
    wrt: Filter
    layers: Sequence[str]
    make: Make  # returns the model with its initial values


def check_stages(
    forward: Forward,
    plain: PlainModel,
    mesh: Mesh | None,
    specs: Sequence[PartitionSpec],
    batch: Batch,
    *,
    seed: int,
    remat: str,
    split: bool,
) -> None:
    """CutError unless the stages of `forward` compute what `plain.loss_fn(model, batch)` and its gradient compute.

    Args:
        forward: The stages, traced on `mesh`.
        plain: The model before it was split.
        mesh: A mesh of one device, or None.
        specs: The specs of the leaves of the model, which belong to their types on Explicit axes; else ().
        batch: Arrays, or ShapeDtypeStructs, which are replaced by random values.
        remat, split: As in `differentiate`.
    """
    place = NamedSharding(mesh, PartitionSpec()) if mesh is not None else jax.local_devices()[0]
    options = _quick_compilation()

    def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: PyTree) -> PyTree:
            around = contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
            with around, user_modes(), short_tracer_errors():
                return fn(*args)

        return jax.jit(run, compiler_options=options)

    with full_precision():
        of_leaves = [NamedSharding(mesh, spec) for spec in specs] if mesh is not None and specs else place
        leaves = jax.device_put(compiled(lambda: made_leaves(plain.make))(), of_leaves)
        args = jax.device_put((_values(batch), jnp.uint32(0), jnp.int32(0)), place)
        unsplit = compiled(_unsplit(forward, plain, seed))
        want, have = unsplit(leaves, *args), compiled(_staged(forward, remat, split))(leaves, *args)
        half = [x for x in _dtypes(forward.program) if jnp.issubdtype(x, jnp.floating) and x.itemsize < 4]
        tolerance = HALF_TOLERANCE if half else TOLERANCE
        found = _differences(forward, want, have, tolerance)
        if found:
            # The gradient of a bias before a softmax, for example, is 0 up to rounding, which is all that it contains.
            epsilon = max(float(jnp.finfo(x).eps) for x in (*half, jnp.float32))
            rounded = unsplit(jax.device_put(_rounded(leaves, epsilon), place), *args)
            found = _differences(forward, want, have, tolerance, rounded)
    if found:
        others = f" (and {len(found) - 1} more of its results)" if len(found) > 1 else ""
        raise CutError(
            f"the stages must compute what the model computes, but on one microbatch {found[0]}{others}. This is a "
            "mistake in the split and not in the model: please report it with the model and its stages, "
            "print(staged). Until it is repaired, train without a pipeline, or move the cut (cuts=, in a recipe "
            "pipeline.cut). The check can be left out: check=False, in a recipe pipeline.check=never."
        )


@functools.cache
def _quick_compilation() -> dict[str, object] | None:
    """Options of XLA that reduce the time of compilation to a third; None if this backend does not know them."""
    options = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
    }
    try:
        jax.jit(lambda: 0, compiler_options=options)()
    except (jax.errors.JaxRuntimeError, ValueError):
        return None
    return options


def _unsplit(forward: Forward, plain: PlainModel, seed: int) -> Run:
    """The reference: the loss and its gradient, as in the plain step."""
    (graphdef, state), leaves, wrt = plain.split_model, forward.leaves, plain.wrt
    treedef = jax.tree.structure(state)

    def run(values: list[jax.Array], batch: Batch, step: jax.Array, microbatch: jax.Array) -> Results:
        called = nnx.merge(graphdef, jax.tree.unflatten(treedef, values))
        params, _, others = nnx.state(called, wrt, nnx.RngState, ..., graph=True)

        def loss_of(params: nnx.State) -> Any:
            key = seed, step, microbatch
            return run_loss(plain.loss_fn, called, wrt, (params, others), batch, key, plain.layers)

        (loss_sum, (weight, metrics, after)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        new = {path: value for variables in after for path, value in named_leaves(variables)}
        grads = dict(named_leaves(grads))
        return Results(
            [{"loss": loss_sum, "weight": weight, **metrics}[name] for name in forward.names],
            {at: _rows(leaf, new[leaf.path]) for at, leaf in enumerate(leaves) if leaf.path in new},
            {at: _rows(leaf, grads[leaf.path]) for at, leaf in enumerate(leaves) if leaf.path in grads},
        )

    return run


def _staged(forward: Forward, remat: str, split: bool) -> Run:
    """The stages one after another: F of each, then B, and W if there is one, in reverse order."""
    wrt = [at for at, leaf in enumerate(forward.leaves) if leaf.trained]
    stages = [differentiate(stage, wrt, remat=remat, split=split) for stage in forward.stages]

    def run(values: list[jax.Array], batch: Batch, step: jax.Array, microbatch: jax.Array) -> Results:
        leaves = [_rows(leaf, values[leaf.source]) for leaf in forward.leaves]
        given = [*leaves, *jax.tree.leaves(batch), step, microbatch]
        sent: dict[Var, jax.Array] = {}
        outputs: dict[int, jax.Array] = {}
        saved = []
        for stage in stages:
            inputs, received = [given[at] for at in stage.inputs], [sent[v] for v in stage.received]
            found = iter(stage.call(stage.forward, inputs, received))
            sent |= {v: next(found) for v in stage.sent}
            outputs |= {at: next(found) for at in stage.outputs}
            saved.append((inputs, received, list(found)))
        cotangents: dict[Var, list[jax.Array]] = {}
        grads = {at: jnp.zeros_like(leaves[at]) for at in wrt}
        for stage, (inputs, received, residuals) in reversed([*zip(stages, saved, strict=True)]):
            assert stage.backward is not None
            summed = [functools.reduce(operator.add, cotangents[stage.sent[i]]) for i in stage.floats_out]
            found = iter(stage.call(stage.backward, inputs, received, summed, residuals))
            for i in stage.floats_in:
                cotangents.setdefault(stage.received[i], []).append(next(found))
            if stage.weights is not None:
                found = stage.call(stage.weights, inputs, received, summed, residuals, list(found))
            for at, gradient in zip(stage.trained, found, strict=True):
                grads[at] = grads[at] + gradient
        new = {at: outputs[out] for out, at in forward.updates.items() if out in outputs}
        unchanged = {at: leaf for at, leaf in enumerate(leaves) if at not in new}  # as in the pipeline
        return Results([outputs[at] for at in range(len(forward.names))], unchanged | new, grads)

    return run


def _differences(
    forward: Forward, want: Results, have: Results, tolerance: float, rounded: Results | None = None
) -> list[str]:
    """One text per result that differs; `rounded` is `want` for parameters that are rounded differently."""
    found = []
    for (name, a), (_, b), (_, c) in zip(
        _named(forward, want, want), _named(forward, want, have), _named(forward, want, rounded or want), strict=True
    ):
        allowed, largest = 0.0, _largest(a)
        if np.issubdtype(a.dtype, np.inexact):
            allowed = max(tolerance * largest, _ROUNDINGS * _distance(a, c))
        difference = _distance(a, b)
        if difference > allowed:
            found.append(
                f"{name} differs by {difference:.3g}, where its largest value is {largest:.3g} and rounding explains "
                f"{allowed:.3g}"
            )
    return found


def _named(forward: Forward, like: Results, results: Results) -> Iterator[tuple[str, np.ndarray]]:
    """(name, value on the host) of the results that `like` has, in one order."""

    def text(leaf: ModelLeaf) -> str:
        return f"{leaf.path} (layers {leaf.rows[0]} to {leaf.rows[1] - 1})" if leaf.rows else leaf.path

    yield from ((f"the sum {name!r}", _host(x)) for name, x in zip(forward.names, results.sums, strict=True))
    yield from ((f"the new value of {text(forward.leaves[at])}", _host(results.variables[at])) for at in like.variables)
    yield from ((f"the gradient of {text(forward.leaves[at])}", _host(results.gradients[at])) for at in like.gradients)


def _host(x: Any) -> np.ndarray:
    if is_key(x):
        return np.asarray(jax.random.key_data(x))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return np.asarray(x).astype(np.complex128)
    return np.asarray(x).astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference; inf if only one of the two values is not finite or the shapes differ."""
    if a.shape != b.shape:
        return np.inf
    wide = np.complex128 if np.iscomplexobj(a) or np.iscomplexobj(b) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    with np.errstate(invalid="ignore"):
        differences = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return float(np.nan_to_num(differences, nan=np.inf, posinf=np.inf).max(initial=0.0))


def _largest(a: np.ndarray) -> float:
    sizes = np.abs(a.astype(np.float64) if not np.iscomplexobj(a) else a)
    return float(sizes[np.isfinite(sizes)].max(initial=0.0))


def _rounded(leaves: Iterable[jax.Array], epsilon: float) -> list[Any]:
    """The leaves with every floating-point value changed by the relative rounding error `epsilon`."""
    rng, found = np.random.default_rng(0), []
    for leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            values = np.asarray(leaf)
            factors = (1 + epsilon * rng.choice([-1.0, 1.0], values.shape)).astype(np.float64)
            wide = np.complex128 if np.iscomplexobj(values) else np.float64
            leaf = (values.astype(wide) * factors).astype(values.dtype)
        found.append(leaf)
    return found


def _values(batch: Batch) -> Batch:
    """`batch` with ShapeDtypeStructs replaced: normal floats, and the integers 0 and 1, which every table has."""
    rng = np.random.default_rng(0)

    def value(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return rng.normal(size=x.shape).astype(x.dtype)
        if is_key(x):
            return jax.random.split(jax.random.key(0), x.shape)
        return rng.integers(0, 2, x.shape).astype(x.dtype)

    return jax.tree.map(value, batch)


def _rows(leaf: ModelLeaf, value: jax.Array) -> jax.Array:
    return value[slice(*leaf.rows)] if leaf.rows else value


def _bytes(eqn: Eqn) -> int:
    """Bytes of all values that an equation computes; those of a scan's body once per iteration."""
    inner = [sum(map(_bytes, body.eqns)) for body in bodies(eqn)]
    return sum(num_bytes(v.aval) for v in eqn.outvars) + max(inner, default=0) * eqn.params.get("length", 1)


def _dtypes(program: Any) -> set[Any]:
    found = {v.aval.dtype for v in getattr(program, "inputs", ())}
    for eqn in program.eqns:
        found |= {v.aval.dtype for v in eqn.outvars if hasattr(v.aval, "dtype")}
        for body in bodies(eqn):
            found |= _dtypes(body)
    return found
