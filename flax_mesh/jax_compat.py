"""The only file that uses names of JAX that are not public; `tests/test_jax_compat.py` has a test for each of them.

A name is looked up where it is first used, so that a JAX that has moved it breaks that use alone, by an error that says
so, or by a slower way that the function names. What is counted as public: jax.core, jax.extend and jax.experimental,
the attributes of jax.Device, and the parameters of equations that a printed jaxpr shows.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any

import jax
from jax.sharding import Mesh, Sharding

TESTED = "0.10.2"  # the version of JAX whose private names these are


def distributed_state() -> Any:
    """What jax.distributed knows: `client`, which has the key-value store (None: not initialized), the text
    `coordinator_address`, and `num_processes`, for which `jax.process_count` would start the backends.

    Public is only `jax.distributed.is_initialized`. Without it no process finds another: RuntimeError.
    """
    return _required("jax._src.distributed.global_state")


def backends_are_initialized() -> bool:
    """Whether JAX has looked for devices, after which `jax.distributed.initialize` is an error.

    Public is only that error. Without it: RuntimeError.
    """
    return _required("jax._src.xla_bridge.backends_are_initialized")()


def legacy_mesh() -> Mesh | None:
    """The mesh of the legacy context, `with mesh:`, in this thread.

    The public name, `jax.interpreters.pxla.thread_resources`, is deprecated and warns. Without the private one there is
    no legacy context: None.
    """
    resources = _optional("jax._src.mesh.thread_resources")
    return None if resources is None or resources.env.physical_mesh.empty else resources.env.physical_mesh


def supports_cross_host_transfers(client: Any) -> bool:
    """Whether the runtime of `client`, a device's, lets `jax.device_put` move arrays between processes.

    JAX asks the same of it, and has no public name for it. Without the attribute: False, the transfer server is used.
    """
    return getattr(client, "supports_cross_host_transfers", False)


def transfers_over_dcn_are_forced() -> bool:
    """Whether the flag is set under which `jax.device_put` between processes does not use the runtime's transfers.

    The flag is no attribute of `jax.config`. Without it: False.
    """
    try:
        return bool(jax.config.read("jax_force_dcn_cross_host_transfers"))
    except AttributeError:
        return False


def device_copy(target: Sharding) -> Callable[[jax.Array], jax.Array] | None:
    """`jax.device_put(x, target)` in a tenth of its time, for an `x` of the same layout on other devices of this
    process: the copy that it calls in the end, without the checks before it.

    The copy has no public name. None where one of the names is gone: call `jax.device_put`.
    """
    copy = _optional("jaxlib.xla_client.batched_copy_array_to_devices_with_sharding")
    array_type, semantics = _optional("jaxlib.xla_client.ArrayImpl"), _optional("jaxlib.xla_client.ArrayCopySemantics")
    devices = getattr(target, "_internal_device_list", None)
    if copy is None or array_type is None or semantics is None or devices is None:
        return None
    there = [devices.addressable_device_list], [target], [semantics.REUSE_INPUT]

    def copied(x: Any) -> jax.Array:
        # Random keys have no buffers of their own; of an array that is deleted the copy would read freed memory.
        if not isinstance(x, array_type) or x.is_deleted():
            return jax.device_put(x, target)
        try:
            return copy([x], *there)[0]
        except jax.errors.JaxRuntimeError:  # jax.transfer_guard takes this for an implicit transfer
            return jax.device_put(x, target)

    return copied


@lru_cache(maxsize=1)
def empty_debug_info() -> Any:
    """What `jax.extend.core.Jaxpr` wants to be told of the function that it was traced from: nothing.

    No public name makes a DebugInfo. It is taken from a traced function that has no arguments and no results; without
    `with_unknown_names` that function's own name appears in error messages.
    """
    info: Any = jax.make_jaxpr(lambda: ())().jaxpr.debug_info
    return info.with_unknown_names() if hasattr(info, "with_unknown_names") else info


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """How many of the inputs of a scan are constants, and how many after them are carried.

    JAX 0.11 has both in a tree of its own, `ft_in`, where 0.10 has two numbers. Without either: KeyError.
    """
    if "ft_in" in eqn.params:
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(list(consts)), len(list(carry))
    return eqn.params["num_consts"], eqn.params["num_carry"]


_lock = threading.Lock()
_depth = 0
_saved: list[Any] = []


@contextmanager
def short_tracer_errors() -> Iterator[None]:
    """Within it, JAX errors about traced values do not tell which operations the value came from.

    Flax asks the count of a random stream for its `sharding` at every use; on a traced value JAX answers with an
    AttributeError, for whose text it walks all operations traced so far. Flax drops the error, and with it 120 of the
    130 s that tracing a decoder of 126 layers takes. JAX has no setting for it. Without the method: tracing as slow as
    that.
    """
    global _depth
    tracer = _optional("jax.interpreters.partial_eval.DynamicJaxprTracer")
    if tracer is None or "_origin_msg" not in vars(tracer):
        yield
        return
    with _lock:  # threads may overlap: the first one in replaces the method, the last one out puts it back
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
    """What has this dotted name, None where nothing has."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute, None)
    except ImportError:
        return None


def _required(name: str) -> Any:
    """What has this dotted name; RuntimeError where nothing has."""
    found = _optional(name)
    if found is None:
        raise RuntimeError(
            f"JAX {jax.__version__} has no {name}, which flax_mesh needs here and which has no public name. flax_mesh "
            f"was tested with JAX {TESTED}: install that version."
        )
    return found
