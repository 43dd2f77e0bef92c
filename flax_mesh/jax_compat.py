"""All uses of private names of JAX and Orbax; `tests/test_jax_compat.py` contains a test for each of them.

A function that uses such names is decorated with `_uses`. It looks them up when it is called, so a release that moved
or changed one affects only that use: the function raises an error, or warns once and takes the fallback that its
docstring describes. Both texts name the versions that were tested. These count as public: jax.core, jax.extend and
jax.experimental, the attributes of jax.Device, and equation parameters that appear in a printed jaxpr.
"""

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, wraps
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import flax
import jax
import numpy as np
from jax import core
from jax.extend import core as jex
from jax.extend.core import primitives
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

# Lines of files in these folders are not lines of the user's code.
LIBRARIES = tuple(f"{Path(file).parent}/" for file in (flax.__file__, __file__))
# The oldest and the newest versions in which these private names were tested.
TESTED = {"jax": ("0.10.2", "0.12.0"), "flax": ("0.12.8", "0.12.12"), "orbax-checkpoint": ("0.12.8", "0.12.8")}
# Names of the primitives of jit and of jax.checkpoint. The name of the latter is remat2; only a printed jaxpr calls it
# checkpoint. JAX 0.12 has one primitive instead of jit, call and closed_call.
JIT = tuple({p.name for p in (primitives.jit_p, primitives.call_p, primitives.closed_call_p)})
REMAT = (primitives.remat_p.name,)

# The exceptions that the use of a missing or changed name raises; jaxlib raises TypeError for other arguments.
CHANGED = (ImportError, AttributeError, KeyError, TypeError, ValueError, RuntimeError)
CPU_OPTIONS: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_cpu_experimental_ynn_fusion_type": ""}
STORE_METHODS = ("key_value_set", "blocking_key_value_get", "key_value_try_get", "key_value_delete")
Result = TypeVar("Result")


class Use(NamedTuple):
    """The private names, or descriptions, that a function uses, and the fallback without them: "" for an error."""

    names: tuple[str, ...]
    fallback: str


USES: dict[str, Use] = {}  # function name -> use


def _uses(
    *names: str, otherwise: Any = None, fallback: str = ""
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """A decorator: the function gets the objects with these dotted names as its first arguments.

    A name that contains a space is a description, and not passed. If a name is missing, or the function fails because
    it has changed, the result is `otherwise`, after one warning that describes the `fallback`. Without a `fallback`:
    RuntimeError.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        USES[function.__name__] = use = Use(names, fallback)

        @wraps(function)
        def tried(*args: Any) -> Result:
            try:
                return function(*(_find(name) for name in names if " " not in name), *args)
            except CHANGED as error:
                problem = _changed_text(use, error)
                if not fallback:
                    raise RuntimeError(problem) from error
                _warn_once(problem)
                return otherwise

        return tried

    return decorate


def _find(name: str) -> Any:
    """The object with this dotted name. Raises ImportError or AttributeError."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError:
        if "." not in module:
            raise
        return getattr(_find(module), attribute)  # an attribute of a class


def _changed_text(use: Use, error: Exception) -> str:
    without = use.fallback and f" Without it {use.fallback}."
    have = ", ".join(f"{package} {metadata.version(package)}" for package in TESTED)
    tested = ", ".join(f"{package} {' and '.join(dict.fromkeys(ends))}" for package, ends in TESTED.items())
    return (
        f"{' and '.join(use.names)}: flax_mesh needs this, which has no public name, and it is missing or has "
        f"changed: {type(error).__name__}: {error}.{without} Installed: {have}. Tested with: {tested}. Install tested "
        "versions."
    )


@lru_cache(maxsize=64)
def _warn_once(problem: str) -> None:
    warnings.warn(problem, RuntimeWarning, stacklevel=4)


@_uses("jax._src.distributed.global_state")
def distributed_state(state: Any) -> Any:
    """The state of jax.distributed: `client` (the key-value store; None if not initialized), `coordinator_address` and
    `num_processes`. The public `jax.process_count` would initialize the backends.

    The only public function is `jax.distributed.is_initialized`. Without the private names, which include the methods
    of the client that `processes/agree.py` calls, processes cannot connect to each other: RuntimeError.
    """
    used = [(state, name) for name in ("client", "coordinator_address", "num_processes")]
    used += [(state.client, name) for name in STORE_METHODS if state.client is not None]
    for owner, name in used:
        getattr(owner, name)
    return state


@_uses("jax._src.xla_bridge.backends_are_initialized")
def backends_are_initialized(are_initialized: Any) -> bool:
    """Whether JAX has initialized its backends, after which `jax.distributed.initialize` raises an error.

    The only public query is that error. Without the private name: RuntimeError.
    """
    return are_initialized()


@_uses("jax._src.mesh.thread_resources", fallback="meshes of the legacy context, `with mesh:`, are ignored")
def legacy_mesh(resources: Any) -> Mesh | None:
    """The mesh of the legacy context manager, `with mesh:`, in this thread.

    The public name, `jax.interpreters.pxla.thread_resources`, is deprecated and warns. Without the private one the
    legacy context is ignored: None.
    """
    mesh = resources.env.physical_mesh
    return None if mesh.empty else mesh


def supports_cross_host_transfers(client: Any) -> bool:
    """Whether the runtime of `client` (of a device) lets `jax.device_put` transfer arrays between processes.

    JAX checks the same attribute and has no public name for it. Without it: False, and the transfer server is used.
    """
    return getattr(client, "supports_cross_host_transfers", False)


@_uses("jax.config.read", otherwise=False, fallback="the flag jax_force_dcn_cross_host_transfers is ignored")
def transfers_over_dcn_are_forced(read: Any) -> bool:
    """Whether a flag keeps `jax.device_put` between processes from using the transfers of the runtime.

    The flag can be read but is not an attribute of `jax.config`. Without it: False.
    """
    return bool(read("jax_force_dcn_cross_host_transfers"))


def device_copy(target: Sharding) -> Callable[[jax.Array], jax.Array] | None:
    """A function equivalent to `jax.device_put(x, target)` that takes a tenth of the host time, for arrays that differ
    from `target` only in their devices, all in this process. It calls the runtime's copy without the preceding checks.

    The copy has no public name. None without it: call `jax.device_put` instead.
    """
    if (runtime := _runtime_copy()) is None:
        return None
    copy, array_type = runtime

    def copied(x: Any) -> jax.Array:
        # The runtime has no buffer for an array of random keys, and its copy of a deleted array would read freed
        # memory.
        if not isinstance(x, array_type) or x.is_deleted():
            return jax.device_put(x, target)
        try:
            return copy(x, target)
        except jax.errors.JaxRuntimeError:  # jax.transfer_guard treats this as an implicit transfer
            return jax.device_put(x, target)

    return copied


@lru_cache(maxsize=1)
@_uses(
    "jaxlib.xla_client.batched_copy_array_to_devices_with_sharding",
    "jaxlib.xla_client.ArrayImpl",
    "jaxlib.xla_client.ArrayCopySemantics",
    "_internal_device_list of shardings",
    fallback="transfers between groups of one process take about ten times the host time",
)
def _runtime_copy(batched_copy: Any, array_type: Any, semantics: Any) -> tuple[Callable[..., jax.Array], type] | None:
    """The runtime's copy as a function of an array and a sharding, and the type of its arrays, tried on one element."""

    def copy(x: Any, target: Any) -> jax.Array:
        devices = [target._internal_device_list.addressable_device_list]
        return batched_copy([x], devices, [target], [semantics.REUSE_INPUT])[0]

    first, *_, last = (NamedSharding(Mesh(np.array([d]), ("x",)), PartitionSpec()) for d in jax.local_devices()[:2] * 2)
    with jax.transfer_guard("allow"):
        x = jax.device_put(np.zeros(1, np.float32), first)
        there = copy(x, last)
    if not isinstance(x, array_type) or there.sharding != last or there.shape != x.shape:
        raise ValueError(f"a copy to {last} returned {type(there).__name__} {there}")
    return copy, array_type


@lru_cache(maxsize=1)
@_uses("debug_info of a jaxpr")
def empty_debug_info() -> Any:
    """An empty DebugInfo, which `jax.extend.core.Jaxpr` requires as the description of the traced function.

    It has no public constructor, so it is taken from the jaxpr of a function without arguments and results. Without
    `with_unknown_names` the name of that function appears in error messages.
    """
    info: Any = jax.make_jaxpr(lambda: ())().jaxpr.debug_info
    return info.with_unknown_names() if hasattr(info, "with_unknown_names") else info


def evaluate(eqn: jex.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """The outputs of one equation for the values of its inputs."""
    # eval_jaxpr also handles primitives with functions as parameters, such as custom_jvp.
    pairs = zip(eqn.invars, values, strict=True)
    known = {atom: value for atom, value in pairs if isinstance(atom, jex.Var)}
    jaxpr = jex.Jaxpr((), tuple(known), eqn.outvars, [eqn], debug_info=empty_debug_info())
    return core.eval_jaxpr(jaxpr, (), *known.values())


@_uses("the parameters ft_in, or num_consts and num_carry, of a scan")
def scan_sizes(eqn: Any) -> tuple[int, int]:
    """The numbers of constants and of loop variables among the inputs of a scan.

    JAX 0.10 stores them as two parameters of the equation, JAX 0.11 in the tree `ft_in`. Without either: RuntimeError.
    """
    if "ft_in" in eqn.params:
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(list(consts)), len(list(carry))
    return eqn.params["num_consts"], eqn.params["num_carry"]


@_uses(
    "jax._src.source_info_util.user_frames", otherwise="", fallback="errors do not name the lines of the user's code"
)
def source_line(user_frames: Any, eqn: Any) -> str:
    """The line of the user's code that an equation comes from: `model.py:31 (Net.__call__)`.

    A printed jaxpr shows the line, but no public function returns it. Without the private name: "".
    """
    for frame in user_frames(eqn.source_info.traceback):
        if not frame.file_name.startswith(LIBRARIES):
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    return ""


@_uses("jax._src.core.ShardingTypeError", otherwise=(), fallback="ambiguous shardings end in the errors of JAX")
def sharding_type_errors(error: Any) -> tuple[type[Exception], ...]:
    """The error that JAX raises for an operation whose sharding is ambiguous on Explicit axes, for an except clause.

    It has no public name. Without the private one: (), so the error is not caught.
    """
    if not issubclass(error, Exception):
        raise TypeError(f"{error} is not an exception")
    return (error,)


@_uses(
    "jax._src.source_info_util.user_context",
    "jax._src.source_info_util.current_name_stack",
    otherwise=nullcontext(),
    fallback="errors about equations that flax_mesh rewrites do not name the lines of the user's code",
)
def in_source_of(user_context: Any, name_stack: Any, eqn: Any) -> AbstractContextManager[Any]:
    """A context in which new equations have the source line and the named scopes of `eqn`.

    Without the private name they have the line of the code that creates them.
    """
    return user_context(eqn.source_info.traceback, name_stack=name_stack() + eqn.source_info.name_stack)


@lru_cache(maxsize=1)
@_uses(
    "the option xla_cpu_experimental_ynn_fusion_type of XLA",
    otherwise={"xla_backend_optimization_level": 0},
    fallback="sums over the elements of a shard, as in jax.random.maxwell, may be rounded differently on every mesh",
)
def reproducible_cpu_options() -> dict[str, Any]:
    """Compiler options with which XLA's CPU backend rounds every element alike, whatever the shape of the array is.

    Level 0 vectorizes nothing: exp, tanh, the inverse error function and others are rounded differently in vectors and
    in the rest of a row. The empty list of fusions keeps YNNPACK from computing sums, which it does only in programs
    for one device. The options are tried on an empty program; options that XLA lacks raise an error there.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        jax.jit(lambda: (), compiler_options=CPU_OPTIONS).lower().compile()
    return CPU_OPTIONS


def float32_on_cpu() -> tuple[str, ...]:
    """The types, by their names in MLIR, that XLA's CPU backend computes and stores in float32."""
    return ("f16", "bf16") if jax.__version_info__ < (0, 11, 2) else ("f16",)


_lock = threading.Lock()
_depth = 0
_saved: list[Any] = []


@contextmanager
def short_tracer_errors() -> Iterator[None]:
    """A context in which JAX errors about traced values do not report the operations that produced the value.

    Flax reads the `sharding` of a random stream's count at every use. For a traced value JAX raises an AttributeError,
    and traverses all operations traced so far to build its message, which Flax discards. This took 120 of the 130 s
    that tracing a decoder of 126 layers takes. JAX has no setting for it. Without the private method: slow tracing.
    """
    global _depth
    if (tracer := _tracer_type()) is None:
        yield
        return
    with _lock:  # threads may overlap: the first thread to enter replaces the method, the last one to leave restores it
        _depth += 1
        if _depth == 1:
            _saved.append(tracer._origin_msg)
            tracer._origin_msg = lambda self: ""
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                tracer._origin_msg = _saved.pop()


@_uses(
    "jax.interpreters.partial_eval.DynamicJaxprTracer",
    "_origin_msg of tracers",
    fallback="the time to trace a model grows quadratically with its layers",
)
def _tracer_type(tracer: Any) -> Any:
    if not callable(vars(tracer)["_origin_msg"]):
        raise TypeError("_origin_msg is not a method")
    return tracer


@_uses(
    "jax.interpreters.ad.primitive_transposes",
    "jax.interpreters.ad.primitive_jvps",
    "jax.interpreters.ad.instantiate_zeros",
    "jax.interpreters.ad.Zero",
    "jax.interpreters.batching.primitive_batchers",
    "jax.interpreters.mlir.register_lowering",
    "jax.interpreters.mlir.lower_fun",
)
def linear_primitive(
    transposes: Any,
    jvps: Any,
    instantiate: Any,
    zero: Any,
    batchers: Any,
    register: Any,
    lower: Any,
    name: str,
    apply: Callable[..., Any],
    abstract_eval: Callable[..., Any],
    transpose: Callable[..., Any],
    batch: Callable[..., Any],
) -> jex.Primitive:
    """A primitive that computes `apply`, whose transposed JAX does not derive: `transpose(gradient, *args, **params)`.

    `jax.custom_derivatives.linear_call` is public, but can neither be batched nor be differentiated by its residuals.
    """
    primitive = jex.Primitive(name)
    primitive.def_impl(apply)
    primitive.def_abstract_eval(abstract_eval)

    def transposed(gradient: Any, *args: Any, **params: Any) -> Any:
        return [None] * len(args) if isinstance(gradient, zero) else transpose(gradient, *args, **params)

    def jvp(args: Any, tangents: Any, **params: Any) -> Any:
        return jax.jvp(lambda *args: apply(*args, **params), tuple(args), tuple(map(instantiate, tangents)))

    transposes[primitive], jvps[primitive], batchers[primitive] = transposed, jvp, batch
    register(primitive, lower(apply, multiple_results=False))
    if not isinstance(zero, type) or not callable(instantiate):
        raise TypeError(f"{zero} is not a class, or {instantiate} not a function")
    return primitive


@_uses("orbax.checkpoint._src.serialization.types")
def deferred_callback(types: Any) -> Any:
    """A callback that makes Orbax copy arrays to the host in turn, within `save_device_host_concurrent_gb`.

    Orbax applies that limit only to deferred arrays, and ignores its `is_prioritized_key_fn`. It has no public
    name for this. Without the private name, saving with `host_bytes` raises a RuntimeError; saving without it and
    reading still work.
    """
    deferred = types.TransferPriority.ASYNCHRONOUS_DEPRIORITIZED
    base = types.DefaultSerializationStatusCallback
    base.key_priority  # noqa: B018  the method that is replaced
    return type("Deferred", (base,), {"key_priority": lambda self, *_, **__: deferred})()


@_uses("jaxlib.mlir.ir", "jaxlib.mlir.passmanager.PassManager")
def propagated_module(ir: Any, manager: Any, lowered: Any, prepare: Callable[[Any, Any], None]) -> Any:
    """The StableHLO module of a lowered function in which Shardy has propagated shardings to every value.

    JAX runs this pass when it compiles, and has no public function that only propagates. `prepare(ir, module)` is
    called before it, with the module `jaxlib.mlir.ir`. Without the private names: an error.
    """
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        prepare(ir, module)
        manager.parse("builtin.module(sdy-propagation-pipeline)").run(module.operation)
    return module


ATTENTION = "flax_mesh.attention"  # target of the calls that stand for attention kernels
KERNEL = "flax_mesh.kernel"  # target of the calls that stand for Pallas kernels, which state their FLOPs
_SPLASH = {"fwd": 2, "dq": 3, "dkv": 4}  # kernel of splash attention -> its matrix products
CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
CHECKS = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")
_kernels_lock = threading.RLock()


@contextmanager
def kernels_without_devices() -> Iterator[None]:
    """A context in which `jax.nn.dot_product_attention(implementation="cudnn")` is traced on any machine.

    JAX asks for the version of cuDNN and for the compute capability of the GPU while it traces. JAX has no setting for
    it. Without the private names: an error.
    """
    module = _attention_module()
    answers = (lambda: 91000, lambda capability: True, lambda capability: False)
    with _kernels_lock:
        saved = [getattr(module, name) for name in CHECKS]
        try:
            for name, answer in zip(CHECKS, answers, strict=True):
                setattr(module, name, answer)
            yield
        finally:
            for name, original in zip(CHECKS, saved, strict=True):
                setattr(module, name, original)


@_uses(*(f"{CUDNN}.{name}" for name in CHECKS))
def _attention_module(*functions: Any) -> Any:
    if not all(map(callable, functions)):
        raise TypeError(f"{functions} are not functions")
    return import_module(CUDNN)


@_uses(
    "jaxlib.mlir.ir",
    "jax._src.interpreters.mlir",
    "jax._src.dispatch.prim_requires_devices_during_lowering",
    f"{CUDNN}._dot_product_attention_fwd_p_wrapper",
    f"{CUDNN}._dot_product_attention_bwd_p_wrapper",
    "jax._src.pallas.pallas_call.pallas_call_p",
    "jax._src.pallas.pallas_call._pallas_call_lowering",
)
def lower_without_devices(
    ir: Any,
    mlir: Any,
    needing_devices: Any,
    forward: Any,
    backward: Any,
    pallas: Any,
    lower_pallas: Any,
    traced: Any,
    platform: str,
    has_devices: bool = False,
) -> Any:
    """`traced.lower()` for a platform that this machine lacks, also on abstract meshes; or for its own devices.

    JAX lowers cuDNN's attention only if devices are present. Here a call of `ATTENTION` stands for it, whose
    `backend_config` is "forward" or "backward" and the kind of mask, and whose operands are queries, keys and values
    first. A call of `KERNEL` stands for splash attention, which Mosaic would lower in seconds and without its FLOPs.
    """

    if pallas.name != "pallas_call" or not callable(lower_pallas):  # used only by programs with Pallas kernels
        raise TypeError(f"{pallas} and {lower_pallas} are not a primitive and its lowering")

    directions = ((forward, "forward"), (backward, "backward"))

    def lower_kernel(ctx: Any, *operands: Any, **params: Any) -> Any:
        if (flops := _splash_flops(ctx.avals_in, params)) is None:
            return lower_pallas(ctx, *operands, **params)
        types = [ir.RankedTensorType.get(x.shape, mlir.dtype_to_ir_type(x.dtype)) for x in ctx.avals_out]
        # Queries, keys and values first: the products have the dtype of the first operand.
        kept = [x for x, aval in zip(operands, ctx.avals_in, strict=True) if _is_floating(aval.dtype)]
        config = f"flops: {flops}"
        return mlir.custom_call(KERNEL, result_types=types, operands=kept, backend_config=config).results

    attention = [(primitive, _attention_lowering(ir, mlir, name)) for primitive, name in directions]
    rules = (*attention, (pallas, lower_kernel))
    # This set is a global of JAX, so the two primitives are put back even if lowering raises an error.
    # JAX keeps the answer for each trace: a run on these devices lowers the same trace, which needs them.
    removed = set[object]() if has_devices else {forward, backward} & needing_devices
    needing_devices -= removed
    try:
        parameters = mlir.LoweringParameters(override_lowering_rules=rules)
        return traced.lower(lowering_platforms=(platform,), _private_parameters=parameters)
    finally:
        needing_devices |= removed


def _attention_lowering(ir: Any, mlir: Any, name: str) -> Callable[..., object]:
    """The lowering of cuDNN's attention to a call of `ATTENTION`; `name` is "forward" or "backward"."""

    def lower(ctx: Any, *operands: Any, mask_type: Any, layout: int, sliding_window_length: Any, **_: Any) -> Any:
        kept = [*operands[:3], *operands[10:]]  # between them: bias, lengths, offsets and pages
        avals = [*ctx.avals_in[:3], *ctx.avals_in[10:]]
        # Outputs with three dims are the statistics of the softmax, which are float32 for every dtype of the
        # operands.
        call = mlir.custom_call(
            ATTENTION,
            result_types=[
                ir.RankedTensorType.get(
                    aval.shape, ir.F32Type.get() if aval.ndim == 3 else operands[0].type.element_type
                )
                for aval in ctx.avals_out
            ],
            operands=kept,
            backend_config=f"{name} {mask_type} {sliding_window_length or 0}",
        )
        # Without a rule, Shardy propagates no shardings through a custom call.
        call.attributes["sdy.sharding_rule"] = ir.Attribute.parse(
            _attention_rule(avals, ctx.avals_out, swapped=layout == 1)
        )
        return call.results

    return lower


def _is_floating(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, jax.numpy.floating)


def _splash_flops(inputs: Sequence[Any], params: Mapping[str, Any]) -> int | None:
    """FLOPs of a call of splash attention; None for other Pallas kernels. `inputs` have shapes.

    The grid counts pairs of blocks of queries and of keys. It is narrower than the sequence for a window; else it has
    all pairs, of which causal attention computes half.
    """
    kind = str(params["name"] or "").split("_")
    if kind[0] != "splash" or len(kind) < 3 or kind[2] not in _SPLASH:
        return None
    mapping = params["grid_mapping"]
    rows, columns = (each.block_shape[-2].block_size for each in mapping.block_mappings[:2])
    query, key, *_ = (x for x in inputs if _is_floating(x.dtype))
    length, block = (query.shape[-2], rows) if kind[2] == "dkv" else (key.shape[-2], columns)
    pairs = math.prod(mapping.grid) / (2 if mapping.grid[-1] * block == length else 1)
    return round(_SPLASH[kind[2]] * 2 * pairs * rows * columns * query.shape[-1])


def _attention_rule(inputs: Any, outputs: Any, swapped: bool) -> str:
    """Shardy's rule for attention: i batch, j queries, k heads of keys, l heads per such head, m and n sizes, o keys.

    `swapped`: heads come before the sequence.
    """
    query, key, value = inputs[:3]
    heads, sequence = (1, 2) if swapped else (2, 1)
    sizes = {"i": query.shape[0], "j": query.shape[sequence], "k": key.shape[heads]}
    sizes |= {"l": query.shape[heads] // key.shape[heads], "m": query.shape[3], "n": value.shape[3]}
    sizes["o"] = key.shape[sequence]
    of_queries = "kl" if sizes["l"] > 1 else "k"  # a factor of size 1 is not allowed beside another one
    sizes = {name: size for name, size in sizes.items() if name != "l" or size > 1}

    def dims(row: str, head: str, last: str) -> str:
        return f"[i, {head}, {row}, {last}]" if swapped else f"[i, {row}, {head}, {last}]"

    q, k, v, out = dims("j", of_queries, "m"), dims("o", "k", "m"), dims("o", "k", "n"), dims("j", of_queries, "n")
    statistics = f"[i, {of_queries}, j]"
    ins, outs = [q, k, v, statistics, out, out][: len(inputs)], [out, statistics]
    if len(inputs) > 3:
        outs = [q, k, v]
    consecutive = str.maketrans(dict(zip(sorted(sizes), "ijklmno", strict=False)))
    factors = ", ".join(f"{name}={sizes[name]}" for name in sorted(sizes)).translate(consecutive)
    rule = f"({', '.join(ins)})->({', '.join(outs[: len(outputs)])})".translate(consecutive)
    return f"#sdy.op_sharding_rule<{rule} {{{factors}}}, custom>"
