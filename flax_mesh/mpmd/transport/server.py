"""Single-device arrays between processes, by JAX's transfer server: non-blocking, matched by name, in any order."""

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
from flax_mesh.processes.start import resolve_address
from flax_mesh.processes.store import get_text, put_text

ADDRESS_TIMEOUT_S = 300  # how long a first receive waits for the sender's first transfer of all

_starting = threading.Lock()
Name = tuple[tuple[int, ...], tuple[int, ...], Hashable, int]


class CallNames:
    """Names for transfers that every process gives alike: it counts calls between the same devices with equal keys."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def name(self, source: Sequence[int], target: Sequence[int], key: Hashable) -> Name:
        """(ids of the source's devices, ids of the target's, key, number of this call among those)."""
        call = (tuple(source), tuple(target), key)
        with self._lock:
            self._counts[repr(call)] += 1  # by text: 1 and True are equal
            return (*call, self._counts[repr(call)])


class Transport:
    """What this process sends to others and receives from them.

    `publish(process, address)` tells the others where this process listens, `look_up(process)` gives another's
    address, waiting for it if need be. A process publishes its own before it looks up any, so no two wait for each
    other. What is asked for with other shapes or dtypes than it was sent with never arrives; the server by itself
    would deliver it as garbage.
    """

    def __init__(self, client: Any, host: str, publish: Callable[[int, str], None], look_up: Callable[[int], str]):
        self.process: int = client.process_index()
        self.calls = CallNames()
        here = f"[{host}]:0" if ":" in host else f"{host}:0"
        transfer = importlib.import_module("jax.experimental.transfer")  # jaxlib has its server on Linux alone
        # Without its own list of addresses for the data the server fails at the first pull and aborts the peer.
        self._server = transfer.start_transfer_server(client, here, [here])
        self._look_up = look_up
        self._peers: dict[int, Any] = {}
        self._lock = threading.Lock()
        publish(self.process, self._server.address())

    def send(self, name: Name, process: int, arrays: Sequence[jax.Array]) -> None:
        """Offer `arrays`, which may still be computing, to `process` under the same name; returns at once."""
        full = [_numbers(array) for array in arrays if array.size]
        if full:
            self._server.await_pull(_uuid(name, self.process, process, full), full)

    def receive(self, name: Name, process: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """What `process` sends under `name`; returns at once with arrays that become ready when they have arrived.

        Every shape has a sharding of one device of this process.
        """
        # The server never delivers an array without elements: both sides leave it out.
        full = [_numbers_like(shape) for shape in shapes if shape.size]
        uuid = _uuid(name, process, self.process, full)
        arrived = iter(self._peer(process).pull(uuid, full) if full else ())
        return [
            _as_asked(
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
    """The transport of this process for the devices of `client`; there is one, as there is one jax.distributed."""
    with _starting:
        return _start(client)


@lru_cache(maxsize=8)
def _start(client: Any) -> Transport:
    if not jax.distributed.is_initialized():
        raise ValueError(
            "A transfer between processes needs jax.distributed, through which they find each other. "
            "Call jax.distributed.initialize() before the first use of JAX."
        )
    folder = f"transfer/{client.platform}"

    def look_up(process: int) -> str:
        try:
            return get_text(f"{folder}/{process}", ADDRESS_TIMEOUT_S)
        except TimeoutError as error:
            raise TimeoutError(
                f"Process {client.process_index()} waited {ADDRESS_TIMEOUT_S} s for process {process} to come to its "
                f"first transfer; every process must make the same calls of mpmd.device_put. ({error})"
            ) from error

    return Transport(
        client,
        address_towards(distributed_state().coordinator_address),
        lambda process, address: put_text(f"{folder}/{process}", address),
        look_up,
    )


def check_key(key: Hashable) -> None:
    """ValueError unless every process writes `key` alike: strings, integers, None, or tuples of these."""
    if not _is_plain(key):
        raise ValueError(f"key must be a string, an integer, None or a tuple of these, got {key!r}.")


def _is_plain(key: Hashable) -> bool:
    return all(map(_is_plain, key)) if isinstance(key, tuple) else key is None or isinstance(key, str | int)


def _uuid(name: Name, sender: int, receiver: int, arrays: Sequence[Any]) -> int:
    """63 bits, as many as the server takes."""
    shapes = [(array.shape, str(array.dtype)) for array in arrays]
    digest = hashlib.blake2b(repr((name, sender, receiver, shapes)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def address_towards(coordinator: str) -> str:
    """The address under which the others, who all reach the coordinator, reach this process."""
    family, address = resolve_address(coordinator)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # a datagram socket: this asks for the route and sends nothing
        return probe.getsockname()[0]


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _numbers(array: jax.Array) -> jax.Array:
    return jax.random.key_data(array) if _is_key(array) else array


def _numbers_like(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    numbers = jax.eval_shape(jax.random.key_data, shape) if _is_key(shape) else shape
    return jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=shape.sharding)


def _as_asked(array: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    if not _is_key(shape):
        return array
    impls: list[Any] = []
    jax.eval_shape(lambda keys: impls.append(jax.random.key_impl(keys)), shape)
    return jax.random.wrap_key_data(array, impl=impls[0])
