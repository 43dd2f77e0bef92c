"""Compares the stages of a loss function, run one after another on one device, with the program before the split."""

import contextlib
import functools
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from flax_mesh.jax_compat import short_tracer_errors
from flax_mesh.modes import user_modes
from flax_mesh.mpmd.split.assign import CutError
from flax_mesh.mpmd.split.backward import differentiate
from flax_mesh.mpmd.split.trace import Forward, ModelLeaf
from flax_mesh.mpmd.split.widen import call_widened, rough_outputs
from flax_mesh.program.program import SCAN, Eqn, Program, Var, bodies, flops, scan_parts, shape_of, trace
from flax_mesh.sharding.abstract import Make, Split, made_leaves
from flax_mesh.step.loss import Batch, LossFn, run_loss
from flax_mesh.tree import PyTree, is_key, named_leaves, num_bytes

TOLERANCE, ROUGH_TOLERANCE = 1e-5, 3e-2  # of the largest value; the second one for results that cannot be widened
_ROUNDINGS = 8  # a difference is rounding if below this many times the effect of parameters rounded differently
_NOISE = 0.02  # standard deviation of the values in the place of zeros
CHEAP_FLOPS, CHEAP_BYTES = 1e10, 2**30


class Results(NamedTuple):
    """The results of one microbatch. The keys are indices of leaves of the model."""

    sums: list[jax.Array]  # loss, weight and metrics
    variables: dict[int, jax.Array]  # new values
    gradients: dict[int, jax.Array]


Named = dict[tuple[int, str], np.ndarray]  # (microbatch, name of a result) -> value on the host
Changed = dict[int | tuple[int, int], jax.Array]  # current values of the variables that a microbatch changes


class Run(NamedTuple):
    """A model that computes one microbatch after another."""

    start: Callable[[list[jax.Array]], Changed]  # from the values of the leaves of the model
    call: Callable[..., tuple[Results, Changed]]  # (values of the leaves, Changed, batch, step, microbatch)


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
    batches: Sequence[Batch],
    *,
    seed: int,
    remat: str,
    split: bool,
) -> None:
    """CutError unless the stages of `forward` have the results of `plain.loss_fn(model, batch)` and its gradient.

    Args:
        forward: The stages, traced on `mesh`.
        plain: The model before it was split.
        mesh: A mesh of one device, or None.
        specs: The specs of the leaves of the model, which belong to their types on Explicit axes; else ().
        batches: Microbatches in order: arrays, or ShapeDtypeStructs, which are replaced by random values.
        remat, split: As in `differentiate`.
    """
    place = NamedSharding(mesh, PartitionSpec()) if mesh is not None else jax.local_devices()[0]
    of_leaves = [NamedSharding(mesh, spec) for spec in specs] if mesh is not None and specs else place
    with full_precision():
        initial = _compiled(mesh, lambda: made_leaves(plain.make))[0]()
        leaves = jax.device_put(_without_zeros(initial, {x.source for x in forward.leaves if x.trained}), of_leaves)
        dtypes = [x.dtype for x in jax.tree.leaves(plain.split_model[1])]
        types = [shape_of(x).update(dtype=dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
        given = [(_values(batch, at), jnp.uint32(0), jnp.int32(at)) for at, batch in enumerate(batches)]
        given = jax.device_put(given, place)
        unsplit, rough = _by_name(forward, _unsplit(forward, plain, seed), mesh, types, given)
        staged, _ = _by_name(forward, _staged(forward, remat, split), mesh, types, given)
        want, have = unsplit(leaves), staged(leaves)
        problems: list[str] = []
        for is_rough, tolerance, dtype in ((False, TOLERANCE, jnp.float32), (True, ROUGH_TOLERANCE, jnp.bfloat16)):
            part = {key: x for key, x in want.items() if (key[1] in rough) == is_rough}
            if _differences(part, have, tolerance):
                # The gradient of a bias before a softmax, for example, is 0 up to rounding: it contains nothing else.
                rounded = unsplit(jax.device_put(_rounded(leaves, float(jnp.finfo(dtype).eps)), of_leaves))
                problems += _differences(part, have, tolerance, rounded)
    if problems:
        others = f" (and {len(problems) - 1} more of its results)" if len(problems) > 1 else ""
        raise CutError(
            f"the stages must compute what the model computes, but on microbatch {problems[0]}{others}. This is a "
            "mistake in the split and not in the model: please report it with the model and its stages, "
            "print(staged). Until it is repaired, train without a pipeline, or move the cut (cuts=, in a recipe "
            "pipeline.cut). The check can be left out: check=False, in a recipe pipeline.check=never."
        )


def _by_name(
    forward: Forward,
    run: Run,
    mesh: Mesh | None,
    types: list[jax.ShapeDtypeStruct],
    given: Sequence[tuple[PyTree, ...]],
) -> tuple[Callable[[list[jax.Array]], Named], set[str]]:
    """(function from leaves to the results of all microbatches, names of those that are not widened).

    `given` has the other arguments of `run.call` by microbatch. It is compiled once, for leaves of these `types`.
    """
    call, (rough, changed_rough) = _compiled(mesh, run.call, types, jax.eval_shape(run.start, types), *given[0])

    def results(leaves: list[jax.Array]) -> Named:
        changed, values = run.start(leaves), {}
        for at, args in enumerate(given):
            results, after = call(leaves, changed, *args)
            changed = jax.device_put(after, jax.tree.map(lambda x: x.sharding, changed))
            values |= {(at, name): _host(x) for name, x in _named(forward, results)}
        return values

    spreads = any(changed_rough.values())  # to all results of the next microbatch
    return results, {name for name, is_rough in _named(forward, rough) if is_rough or spreads}


def _compiled(mesh: Mesh | None, fn: Callable[..., PyTree], *types: PyTree) -> tuple[Callable[..., PyTree], PyTree]:
    """(`fn` jitted for widened arguments, which of its results depend on equations that cannot be widened)."""

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        inner = contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
        with inner, user_modes(), short_tracer_errors():
            yield

    with around():
        program, shape = trace(fn, *types)
    tree = jax.tree.structure(shape)

    def run(*args: PyTree) -> PyTree:
        with around():
            return jax.tree.unflatten(tree, call_widened(program, jax.tree.leaves(args)))

    return jax.jit(run, compiler_options=_quick_compilation()), jax.tree.unflatten(tree, rough_outputs(program))


@functools.cache
def _quick_compilation() -> dict[str, object]:
    """Options of XLA that reduce the time of compilation to a third: those that this backend knows."""
    options = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
    }

    def is_known(name: str) -> bool:
        try:
            jax.jit(lambda: 0, compiler_options={name: options[name]})()
        except (jax.errors.JaxRuntimeError, ValueError):
            return False
        return True

    return {name: value for name, value in options.items() if is_known(name)}


def _unsplit(forward: Forward, plain: PlainModel, seed: int) -> Run:
    """The reference: the loss and its gradient, as in the plain step."""
    (graphdef, state), leaves, wrt = plain.split_model, forward.leaves, plain.wrt
    treedef = jax.tree.structure(state)
    changing = {leaves[at].source: leaves[at].path for at in forward.updates.values()}

    def start(values: list[jax.Array]) -> Changed:
        return {at: values[at] for at in changing}

    def call(values: list[jax.Array], changed: Changed, batch: Batch, *counts: jax.Array) -> tuple[Results, Changed]:
        values = [changed.get(at, value) for at, value in enumerate(values)]
        called = nnx.merge(graphdef, jax.tree.unflatten(treedef, values))
        params, _, others = nnx.state(called, wrt, nnx.RngState, ..., graph=True)

        def loss_of(params: nnx.State) -> tuple[jax.Array, PyTree]:
            return run_loss(plain.loss_fn, called, wrt, (params, others), batch, (seed, *counts), plain.layers)

        (loss_sum, (weight, metrics, after)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        new = {path: value for variables in after for path, value in named_leaves(variables)}
        grads = dict(named_leaves(grads))
        results = Results(
            [{"loss": loss_sum, "weight": weight, **metrics}[name] for name in forward.names],
            {at: _rows(leaf, new[leaf.path]) for at, leaf in enumerate(leaves) if leaf.path in new},
            {at: _rows(leaf, grads[leaf.path]) for at, leaf in enumerate(leaves) if leaf.path in grads},
        )
        return results, {at: new[path] for at, path in changing.items()}

    return Run(start, call)


def _staged(forward: Forward, remat: str, split: bool) -> Run:
    """The stages one after another: F of each, then B, and W if there is one, in reverse order.

    As in a pipeline, a stage reads the value of a variable that its F left in the microbatch before.
    """
    wrt = [at for at, leaf in enumerate(forward.leaves) if leaf.trained]
    stages = [differentiate(stage, wrt, remat=remat, split=split) for stage in forward.stages]
    updates = [{forward.updates[out]: out for out in x.outputs if out in forward.updates} for x in stages]

    def start(values: list[jax.Array]) -> Changed:
        rows = {at: _rows(leaf, values[leaf.source]) for at, leaf in enumerate(forward.leaves)}
        return {(k, at): rows[at] for k, changed in enumerate(updates) for at in changed}

    def call(values: list[jax.Array], changed: Changed, batch: Batch, *counts: jax.Array) -> tuple[Results, Changed]:
        given = [*(_rows(leaf, values[leaf.source]) for leaf in forward.leaves), *jax.tree.leaves(batch), *counts]
        sent: dict[Var, jax.Array] = {}
        sums: dict[int, jax.Array] = {}
        stored: dict[int, jax.Array] = {}  # by the first stage that returns a new value
        saved = []
        for k, stage in enumerate(stages):
            inputs = [changed.get((k, at), given[at]) for at in stage.inputs]
            received = [sent[v] for v in stage.received]
            arrays = iter(stage.call(stage.forward, inputs, received))
            sent |= {v: next(arrays) for v in stage.sent}
            outputs = {out: next(arrays) for out in stage.outputs}
            sums |= outputs
            new = {at: outputs[out] for at, out in updates[k].items()}
            changed, stored = changed | {(k, at): x for at, x in new.items()}, new | stored
            saved.append((inputs, received, list(arrays)))
        cotangents: dict[Var, list[jax.Array]] = {}
        grads: dict[int, list[jax.Array]] = {at: [] for at in wrt}
        for stage, (inputs, received, residuals) in reversed([*zip(stages, saved, strict=True)]):
            assert stage.backward is not None
            summed = [functools.reduce(operator.add, cotangents[stage.sent[i]]) for i in stage.floats_out]
            gradients = iter(stage.call(stage.backward, inputs, received, summed, residuals))
            for i in stage.floats_in:
                cotangents.setdefault(stage.received[i], []).append(next(gradients))
            if stage.weights is not None:
                gradients = stage.call(stage.weights, inputs, received, summed, residuals, list(gradients))
            for at, gradient in zip(stage.trained, gradients, strict=True):
                grads[at].append(gradient)
        zeros = {at: [jnp.zeros_like(given[at])] for at, parts in grads.items() if not parts}
        results = Results(
            [sums[at] for at in range(len(forward.names))],
            dict(enumerate(given[: len(forward.leaves)])) | stored,
            {at: functools.reduce(operator.add, parts) for at, parts in (grads | zeros).items()},
        )
        return results, changed

    return Run(start, call)


def _differences(want: Named, have: Named, tolerance: float, rounded: Named | None = None) -> list[str]:
    """One text per result that differs; `rounded` is `want` for parameters that are rounded differently."""
    problems = []
    for key, a in want.items():
        allowed, largest = 0.0, _largest(a)
        if np.issubdtype(a.dtype, np.inexact):
            allowed = max(tolerance * largest, _ROUNDINGS * _distance(a, (rounded or want)[key]))
        difference = _distance(a, have[key])
        if difference > allowed:
            problems.append(
                f"{key[0]} {key[1]} differs by {difference:.3g}, where its largest value is {largest:.3g} and rounding "
                f"explains {allowed:.3g}"
            )
    return problems


def _named(forward: Forward, results: Results) -> Iterator[tuple[str, PyTree]]:
    """(name, result) of all results."""

    def text(leaf: ModelLeaf) -> str:
        return f"{leaf.path} (layers {leaf.rows[0]} to {leaf.rows[1] - 1})" if leaf.rows else leaf.path

    yield from ((f"the sum {name!r}", x) for name, x in zip(forward.names, results.sums, strict=True))
    yield from ((f"the new value of {text(forward.leaves[at])}", x) for at, x in results.variables.items())
    yield from ((f"the gradient of {text(forward.leaves[at])}", x) for at, x in results.gradients.items())


def _host(x: jax.Array) -> np.ndarray:
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


def _without_zeros(leaves: Sequence[jax.Array], trained: Container[int]) -> list[ArrayLike]:
    """The leaves with small normal values in the place of the zeros of trained ones.

    At the start of a run, the gates and projections of adaLN-zero, ReZero and LoRA are zeros, and hide the values that
    they are multiplied by, with their gradients.
    """
    rng, filled = np.random.default_rng(0), []
    for at, leaf in enumerate(leaves):
        if at in trained and (is_zero := np.asarray(leaf) == 0).any():
            leaf = np.where(is_zero, rng.normal(0, _NOISE, leaf.shape), leaf).astype(leaf.dtype)
        filled.append(leaf)
    return filled


def _rounded(leaves: Iterable[jax.Array], epsilon: float) -> list[ArrayLike]:
    """The leaves with every floating-point value changed by the relative rounding error `epsilon`."""
    rng, rounded = np.random.default_rng(0), []
    for leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            values = np.asarray(leaf)
            factors = (1 + epsilon * rng.choice([-1.0, 1.0], values.shape)).astype(np.float64)
            wide = np.complex128 if np.iscomplexobj(values) else np.float64
            leaf = (values.astype(wide) * factors).astype(values.dtype)
        rounded.append(leaf)
    return rounded


def _values(batch: Batch, seed: int) -> Batch:
    """`batch` with ShapeDtypeStructs replaced: normal floats, and the integers 0 and 1, which every table has."""
    rng = np.random.default_rng(seed)

    def value(x: ArrayLike | jax.ShapeDtypeStruct) -> ArrayLike:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return rng.normal(size=x.shape).astype(x.dtype)
        if is_key(x):
            return jax.random.split(jax.random.key(seed), x.shape)
        return rng.integers(0, 2, x.shape).astype(x.dtype)

    return jax.tree.map(value, batch)


def _rows(leaf: ModelLeaf, value: jax.Array) -> jax.Array:
    return value[slice(*leaf.rows)] if leaf.rows else value


def _bytes(eqn: Eqn) -> int:
    """Bytes of all values that an equation computes, with the body of a scan once per iteration."""
    inner = [sum(map(_bytes, body.eqns)) for body in bodies(eqn)]
    times = scan_parts(eqn).length if eqn.primitive.name == SCAN else 1
    return sum(num_bytes(v.aval) for v in eqn.outvars) + max(inner, default=0) * times
