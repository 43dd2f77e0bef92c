"""Transfers of single-device arrays by JAX's transfer server: asynchronous, matched by name, in any order."""

import hashlib
import importlib
import socket
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from flax_mesh.jax_compat import distributed_state
from flax_mesh.processes.agree import get_text, put_text
from flax_mesh.processes.start import resolve_address
from flax_mesh.tree import Shaped, is_key

# The timeout of the first receive from a process. The sender publishes its address at its first transfer.
_ADDRESS_TIMEOUT_S = 300

_starting = threading.Lock()
Name = tuple[Hashable, ...]


class CallNames:
    """Names of transfers, equal in every process: counts the calls with equal keys between the same devices."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def name(self, source: Sequence[int], target: Sequence[int], key: Hashable) -> Name:
        """(ids of the source's devices, ids of the target's devices, key, number of this call among equal calls)."""
        call = (tuple(source), tuple(target), key)
        with self._lock:
            self._counts[repr(call)] += 1  # repr, because 1 == True
            return (*call, self._counts[repr(call)])


class Transport:
    """Sends to and receives from other processes.

    `publish(process, address)` stores the address of this process; `look_up(process)` returns the address of
    another process and blocks until it is published. Every process publishes its address before it looks up any, so
    this cannot deadlock. Shapes and dtypes are part of a transfer's name: if a receiver requests another shape or dtype
    than the sender has, the array never arrives. The server itself does not check them and would deliver wrong values.
    """

    def __init__(self, client: Any, host: str, publish: Callable[[int, str], None], look_up: Callable[[int], str]):
        self.process: int = client.process_index()
        self.calls = CallNames()
        here = f"[{host}]:0" if ":" in host else f"{host}:0"
        transfer = importlib.import_module("jax.experimental.transfer")  # jaxlib has the server on Linux only
        # Without an explicit list of data addresses, the first pull fails and aborts the other process.
        self._server = transfer.start_transfer_server(client, here, [here])
        self._look_up = look_up
        self._peers: dict[int, Any] = {}
        self._lock = threading.Lock()
        publish(self.process, self._server.address())

    def send(self, name: Name, process: int, arrays: Sequence[jax.Array]) -> None:
        """Makes `arrays` available to `process` under `name`. They may still be computing; returns immediately."""
        full = [_key_data(array) for array in arrays if array.size]
        if full:
            self._server.await_pull(_uuid(name, self.process, process, full), full)

    def receive(self, name: Name, process: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """The arrays that `process` sends under `name`. Returns immediately; an array is ready when it has arrived.

        Every entry of `shapes` has a single-device sharding of this process.
        """
        # The server never delivers empty arrays: both sides omit them.
        full = [_key_data_like(shape) for shape in shapes if shape.size]
        uuid = _uuid(name, process, self.process, full)
        arrived = iter(self._peer(process).pull(uuid, full) if full else ())
        return [
            _as_requested(
                next(arrived) if shape.size else jnp.zeros(shape.shape, shape.dtype, device=shape.sharding), shape
            )
            for shape in shapes
        ]

    def _peer(self, process: int) -> Any:
        with self._lock:
            if process not in self._peers:
                self._peers[process] = self._server.connect(self._look_up(process))
            return self._peers[process]


def transport_of(client: Any) -> Transport:
    """The transport of this process for the devices of `client`; created once per client."""
    with _starting:
        return _start(client)


@lru_cache(maxsize=8)
def _start(client: Any) -> Transport:
    if not jax.distributed.is_initialized():
        raise ValueError(
            "Transfers between processes require jax.distributed, which stores the address of every process. "
            "Call jax.distributed.initialize() before the first use of JAX."
        )
    folder = f"transfer/{client.platform}"

    def look_up(process: int) -> str:
        try:
            return get_text(f"{folder}/{process}", _ADDRESS_TIMEOUT_S)
        except TimeoutError as error:
            raise TimeoutError(
                f"Process {client.process_index()} waited {_ADDRESS_TIMEOUT_S} s for the first transfer of "
                f"process {process}; every process must make the same calls of mpmd.device_put. ({error})"
            ) from error

    return Transport(
        client,
        address_towards(distributed_state().coordinator_address),
        lambda process, address: put_text(f"{folder}/{process}", address),
        look_up,
    )


def check_key(key: Hashable) -> None:
    """Raises a ValueError unless `key` has the same repr in every process: string, integer, None, or tuple of these."""
    if not _is_plain(key):
        raise ValueError(f"key must be a string, an integer, None or a tuple of these, got {key!r}.")


def _is_plain(key: Hashable) -> bool:
    return all(map(_is_plain, key)) if isinstance(key, tuple) else key is None or isinstance(key, str | int)


def _uuid(name: Name, sender: int, receiver: int, arrays: Sequence[Shaped]) -> int:
    """63 bits, the size that the server accepts."""
    shapes = [(array.shape, str(array.dtype)) for array in arrays]
    digest = hashlib.blake2b(repr((name, sender, receiver, shapes)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def address_towards(coordinator: str) -> str:
    """The address of this process on the network of the coordinator, which all processes can reach."""
    family, address = resolve_address(coordinator)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # of a datagram socket: selects a route and sends nothing
        return probe.getsockname()[0]


def _key_data(array: jax.Array) -> jax.Array:
    return jax.random.key_data(array) if is_key(array) else array


def _key_data_like(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    data = jax.eval_shape(jax.random.key_data, shape) if is_key(shape) else shape
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=shape.sharding)


def _as_requested(array: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    if not is_key(shape):
        return array
    impls: list[Any] = []
    jax.eval_shape(lambda keys: impls.append(jax.random.key_impl(keys)), shape)
    return jax.random.wrap_key_data(array, impl=impls[0])
