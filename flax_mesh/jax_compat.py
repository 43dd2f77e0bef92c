"""All uses of private JAX names; `tests/test_jax_compat.py` contains a test for each of them.

A name is looked up at its first use, so a JAX release that moved it affects only that use: the function raises an error
that names it, or takes the slower fallback that its docstring describes. These count as public: jax.core, jax.extend
and jax.experimental, the attributes of jax.Device, and equation parameters that appear in a printed jaxpr.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import flax
import jax
from jax.sharding import Mesh, Sharding

LIBRARIES = tuple(f"{Path(file).parent}/" for file in (flax.__file__, __file__))  # whose lines are not the user's
TESTED = ("0.10.2", "0.12.0")  # the oldest and the newest JAX version in which these private names were tested


def distributed_state() -> Any:
    """The state of jax.distributed: `client` (the key-value store; None if not initialized), `coordinator_address` and
    `num_processes`. The public `jax.process_count` would initialize the backends.

    The only public function is `jax.distributed.is_initialized`. Without the private name processes cannot connect to
    each other: RuntimeError.
    """
    return _required("jax._src.distributed.global_state")


def backends_are_initialized() -> bool:
    """Whether JAX has initialized its backends, after which `jax.distributed.initialize` raises an error.

    There is no public query, only that error. Without the private name: RuntimeError.
    """
    return _required("jax._src.xla_bridge.backends_are_initialized")()


def legacy_mesh() -> Mesh | None:
    """The mesh of the legacy context manager, `with mesh:`, in this thread.

    The public name, `jax.interpreters.pxla.thread_resources`, is deprecated and warns. Without the private one the
    legacy context is ignored: None.
    """
    resources = _optional("jax._src.mesh.thread_resources")
    return None if resources is None or resources.env.physical_mesh.empty else resources.env.physical_mesh


def supports_cross_host_transfers(client: Any) -> bool:
    """Whether the runtime of `client` (of a device) lets `jax.device_put` transfer arrays between processes.

    JAX checks the same attribute and has no public name for it. Without it: False, and the transfer server is used.
    """
    return getattr(client, "supports_cross_host_transfers", False)


def transfers_over_dcn_are_forced() -> bool:
    """Whether a flag keeps `jax.device_put` between processes from using the transfers of the runtime.

    The flag can be read but is not an attribute of `jax.config`. Without it: False.
    """
    try:
        return bool(jax.config.read("jax_force_dcn_cross_host_transfers"))
    except AttributeError:
        return False


def device_copy(target: Sharding) -> Callable[[jax.Array], jax.Array] | None:
    """A function equivalent to `jax.device_put(x, target)` that takes a tenth of the host time, for arrays that differ
    from `target` only in their devices, all in this process. It calls the runtime's copy without the preceding checks.

    The copy has no public name. None if one of the private names is missing: call `jax.device_put` instead.
    """
    copy = _optional("jaxlib.xla_client.batched_copy_array_to_devices_with_sharding")
    array_type, semantics = _optional("jaxlib.xla_client.ArrayImpl"), _optional("jaxlib.xla_client.ArrayCopySemantics")
    devices = getattr(target, "_internal_device_list", None)
    if copy is None or array_type is None or semantics is None or devices is None:
        return None
    destination = [devices.addressable_device_list], [target], [semantics.REUSE_INPUT]

    def copied(x: Any) -> jax.Array:
        # Random keys have no buffers of their own, and the copy of a deleted array would read freed memory.
        if not isinstance(x, array_type) or x.is_deleted():
            return jax.device_put(x, target)
        try:
            return copy([x], *destination)[0]
        except jax.errors.JaxRuntimeError:  # jax.transfer_guard treats this as an implicit transfer
            return jax.device_put(x, target)

    return copied


@lru_cache(maxsize=1)
def empty_debug_info() -> Any:
    """An empty DebugInfo, which `jax.extend.core.Jaxpr` requires as the description of the traced function.

    There is no public constructor, so it is taken from the jaxpr of a function without arguments and results. Without
    `with_unknown_names` the name of that function appears in error messages.
    """
    info: Any = jax.make_jaxpr(lambda: ())().jaxpr.debug_info
    return info.with_unknown_names() if hasattr(info, "with_unknown_names") else info


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """The numbers of constants and of loop variables among the inputs of a scan.

    JAX 0.10 stores them as two parameters of the equation, JAX 0.11 in the tree `ft_in`. Without either: KeyError.
    """
    if "ft_in" in eqn.params:
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(list(consts)), len(list(carry))
    return eqn.params["num_consts"], eqn.params["num_carry"]


def source_line(eqn: Any) -> str:
    """The line of the user's code that an equation comes from: `model.py:31 (Net.__call__)`.

    A printed jaxpr shows it, but there is no public function for it. Without the private name: "".
    """
    frames = _optional("jax._src.source_info_util.user_frames")
    for frame in () if frames is None else frames(eqn.source_info.traceback):
        if not frame.file_name.startswith(LIBRARIES):
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    return ""


def sharding_type_errors() -> tuple[type[Exception], ...]:
    """The error that JAX raises for an operation whose sharding is ambiguous on Explicit axes, for an except clause.

    It has no public name. Without the private one: (), so the error is not caught.
    """
    error = _optional("jax._src.core.ShardingTypeError")
    return () if error is None else (error,)


def in_source_of(eqn: Any) -> AbstractContextManager[Any]:
    """A context in which new equations have the source line of `eqn`. Without the private name they have their own."""
    context = _optional("jax._src.source_info_util.user_context")
    return nullcontext() if context is None else context(eqn.source_info.traceback)


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
    tracer = _optional("jax.interpreters.partial_eval.DynamicJaxprTracer")
    if tracer is None or "_origin_msg" not in vars(tracer):
        yield
        return
    with _lock:  # threads may overlap: the first one to enter replaces the method, the last one to leave restores it
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


@lru_cache(maxsize=64)
def _optional(name: str) -> Any:
    """The object with this dotted name; None if it does not exist."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute, None)
    except ImportError:
        return None


def _required(name: str) -> Any:
    found = _optional(name)
    if found is None:
        raise RuntimeError(
            f"JAX {jax.__version__} has no {name}, which flax_mesh requires and for which there is no public name. "
            f"flax_mesh was tested with JAX {' and '.join(TESTED)}: install one of these versions."
        )
    return found
