"""Collective operations of all processes: equality checks, broadcasts, stopping at the same step, tasks in phases.

They exchange short texts through the key-value store of jax.distributed. Each is written once by default. `Shares` needs
no messages: which process writes which parts of the arrays that several have.
"""

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from flax_mesh.errors import CheckpointCorruptedError, ConfigError, PeerError
from flax_mesh.jax_compat import distributed_state
from flax_mesh.text import processes_text, says

ROOT = "flax_mesh"
_calls: Counter[str] = Counter()  # global, because jax.distributed is global to a process

_BROADCAST_ERRORS = {kind.__name__: kind for kind in (ConfigError, CheckpointCorruptedError)}
_TIMEOUT_S = 600  # for the slowest process, which may have to trace a model first
_PHASE_TIMEOUT_S = 1200  # for the slowest process to complete a phase
_MARGIN_S = 60  # the other processes wait this much longer than process 0, which reports the late process
_DIVIDED = 2**20  # bytes of a shard from which on several processes write parts of it
Bounds = tuple[tuple[int, int], ...]  # of a shard in its array: the first index of each dim, and the one after the last


def assert_equal(name: str, facts: Mapping[str, str]) -> None:
    """Raises a ConfigError in all processes unless `facts` is equal in all of them.

    Every process must call it with the same `name`, in the same order. The error lists the fields that differ, and the
    processes with each value.

    Example:
        >>> from flax_mesh.processes import assert_equal
        >>> assert_equal("data", {"number of rows": "1000", "seed": "0"})
    """
    if jax.process_count() == 1:
        return

    def differences(texts: Sequence[str]) -> str:
        return "\n".join(_differences(list(map(json.loads, texts))))

    if problems := decide_at_process_0(f"assert_equal/{name}", json.dumps(dict(facts)), differences):
        repair = "Start all processes with the same code, recipe, settings, data and versions."
        raise ConfigError(["the processes of this run differ:", *problems.split("\n"), repair])


def decide_at_process_0(name: str, text: str, decide: Callable[[Sequence[str]], str]) -> str:
    """Calls `decide` in process 0 with the texts of all processes, and returns its result in all processes.

    Every process must call it with the same `name`, in the same order. It raises the errors of
    `broadcast_from_process_0`.
    """
    if jax.process_count() == 1:
        return decide([text])
    name = f"{name}/{call_number(f'decide_at_process_0 {name}')}"
    put_text(f"{name}/{jax.process_index()}", text)
    processes = range(jax.process_count())
    return broadcast_from_process_0(f"{name}/decided", lambda: decide([_wait(f"{name}/{p}", p) for p in processes]))


def broadcast_from_process_0(name: str, decide: Callable[[], str]) -> str:
    """Calls `decide` in process 0 and returns its result in all processes.

    Every process must call it with the same `name`, in the same order. A ConfigError or CheckpointCorruptedError of
    `decide` is raised in all processes.

    Example:
        >>> from flax_mesh.processes import broadcast_from_process_0
        >>> broadcast_from_process_0("name of the run", lambda: "monday")
        'monday'
    """
    if jax.process_count() == 1:
        return decide()
    name = f"{name}/{call_number(f'broadcast_from_process_0 {name}')}"
    if jax.process_index() != 0:
        result = json.loads(_wait(f"broadcast/{name}", 0))
        if "problems" in result:
            raise _BROADCAST_ERRORS.get(result["kind"], ConfigError)(
                [f"process 0: {problem}" for problem in result["problems"]]
            )
        return result["value"]
    try:
        value = decide()
    except ConfigError as error:
        put_text(f"broadcast/{name}", json.dumps({"kind": type(error).__name__, "problems": error.lines}))
        raise
    put_text(f"broadcast/{name}", json.dumps({"value": value}))
    return value


def stop_together(should_stop: Callable[[], bool], name: str = "stop") -> Callable[[], bool]:
    """A function that every process calls once after each step. It returns True in all processes after the same step,
    soon after `should_stop` returned True in one of them.

    The call after step n requires that step n - 1 is known to have ended in all processes. Reading its metrics ensures
    this.

    Example:
        >>> from flax_mesh.processes import stop_together
        >>> is_full = stop_together(lambda: True)
        >>> is_full()
        True
    """
    if jax.process_count() == 1:
        return should_stop
    name = f"{name}/{call_number(name)}"
    is_first, calls, stop_after = jax.process_index() == 0, 0, 0

    # Process 0 announces in its call n that all stop after call n + 2. No process can be past that call: call n + 2
    # requires that step n + 1 has ended, and process 0 dispatches step n + 1 only after the announcement.
    #
    #     process 0   call n: announce n + 2 -- step n + 1 -- call n + 1 -- step n + 2 -- call n + 2: stop
    #     process 1   call n + 1 at the latest, may miss the announcement -- step n + 2 -- call n + 2: stop
    def stop() -> bool:
        nonlocal calls, stop_after
        calls += 1
        if not stop_after and is_first and (should_stop() or try_get_text(f"{name}/request") is not None):
            stop_after = calls + 2
            put_text(f"{name}/after", str(stop_after))
        elif not stop_after and not is_first:
            stop_after = int(try_get_text(f"{name}/after") or 0)
            if not stop_after and should_stop():
                put_text(f"{name}/request", "stop", overwrite=True)
        return bool(stop_after) and calls >= stop_after

    return stop


class Phases:
    """A collective task `name` in several `phases`, each of which succeeds in all processes or raises an error in all.

    Every process creates its `Phases` in the same order, and calls `passed` at the end of each phase, or `failed` on an
    error. Process 0 collects the results of a phase and sends them to the others: 2 messages per process. The calls may
    come from several threads. With a single process nothing is sent or waited for.
    """

    def __init__(self, name: str, phases: Sequence[str]):
        self.phases = tuple(phases)
        self.together = jax.process_count() > 1
        self._index = jax.process_index()
        self._number = call_number(f"phases {name}")
        self._root = f"phases/{name}"
        self._remaining = list(phases)  # phases whose result this process does not know yet
        self._collected: set[str] = set()  # phases whose result process 0 has sent to the others

    def passed(self, phase: str) -> None:
        """Returns when all processes have called it for this phase; raises a PeerError if one of them has failed."""
        if self.together:
            problems = self._collect(phase) if self._index == 0 else self._report(phase)
            if problems:
                raise PeerError("; ".join(problems))
        self._remaining.remove(phase)
        if self.together and self._index == 0 and phase == self.phases[0]:
            # All processes are in this task, so none reads the previous one.
            delete_texts(f"{self._root}/{self._number - 1}")

    def is_past(self, phase: str) -> bool:
        return phase not in self._remaining

    def failed(self, reason: str) -> None:
        """Reports to the other processes that the task failed here; `reason` is one line. Does not wait for them."""
        text = json.dumps([reason])
        # Results that are already collected are not overwritten: a slow process may not have read them yet.
        for phase in [phase for phase in self._remaining if phase not in self._collected] if self.together else ():
            put_text(self._key(phase, "all" if self._index == 0 else self._index), text, overwrite=True)

    def _collect(self, phase: str) -> list[str]:
        problems = []
        for process in range(1, jax.process_count()):
            try:
                problems += json.loads(get_text(self._key(phase, process), _PHASE_TIMEOUT_S))
            except TimeoutError:
                problems.append(f"process {process} has not completed the phase {phase!r} within {_PHASE_TIMEOUT_S} s")
        self._collected.add(phase)
        put_text(self._key(phase, "all"), json.dumps(problems), overwrite=True)
        return problems

    def _report(self, phase: str) -> list[str]:
        put_text(self._key(phase, self._index), "[]", overwrite=True)
        return json.loads(get_text(self._key(phase, "all"), _PHASE_TIMEOUT_S + _MARGIN_S))

    def _key(self, phase: str, sender: int | str) -> str:
        return f"{self._root}/{self._number}/{phase}/{sender}"


class Part(NamedTuple):
    """A part of a shard: where the shard is in its array, and the part in the shard."""

    shard: Bounds
    slices: tuple[slice, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        """Where the part is in the array."""
        return tuple(slice(at + x.start, at + x.stop) for (at, _), x in zip(self.shard, self.slices, strict=True))


class Shares:
    """Decides which parts of arrays each process writes. All processes decide alike: they must make the same calls.

    A large shard that N processes have is divided into N equal parts, or a few more. Those that have the fewest bytes
    so far write the parts that remain, and the shards that are not divided.
    """

    def __init__(self) -> None:
        self._bytes: Counter[int] = Counter()  # by process

    def of_this_process(
        self, places: dict[Bounds, list[int]], itemsize: int, *, divide: bool = True
    ) -> tuple[tuple[int, ...], list[Part]]:
        """The shape of all parts of an array, and the parts that this process writes. `places` are as of `places_of`.

        `divide`: whether shards may be divided.
        """
        shape = tuple(stop - start for start, stop in next(iter(places)))
        dim, count = 0, 1
        if divide and math.prod(shape) * itemsize >= _DIVIDED:
            dim, count = _division(shape, min(map(len, places.values())))
        shape, parts = tuple(size // count if i == dim else size for i, size in enumerate(shape)), list[Part]()
        for shard, processes in places.items():
            order = sorted(processes, key=lambda process: (self._bytes[process], process))
            for number in range(count):
                process = order[number % len(order)]
                # What only one process has is not counted: it may differ, as a counter on a device of each process.
                self._bytes[process] += math.prod(shape) * itemsize * (len(processes) > 1)
                if process == jax.process_index():
                    starts = [size * number * (i == dim) for i, size in enumerate(shape)]
                    slices = (slice(at, at + size) for at, size in zip(starts, shape, strict=True))
                    parts.append(Part(shard, tuple(slices)))
        return shape, parts


@functools.lru_cache(maxsize=4096)
def places_of(sharding: Sharding, shape: tuple[int, ...]) -> dict[Bounds, list[int]]:
    """The processes that have each shard of an array, in the same order in all processes."""
    places: dict[Bounds, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        places.setdefault(bounds(index, shape), set()).add(device.process_index)
    return {shard: sorted(processes) for shard, processes in places.items()}


def bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    """Where the shard with this `index` is in an array of this `shape`."""
    return tuple(x.indices(size)[:2] for x, size in zip(index, shape, strict=True))


@functools.lru_cache(maxsize=4096)
def _division(shape: tuple[int, ...], processes: int) -> tuple[int, int]:
    """The dim of a shard to divide, and the number of equal parts: 1 if no number below 2 * `processes` is possible."""
    counts = range(processes, 2 * processes)
    possible = [(count, dim) for dim, size in enumerate(shape) for count in counts if size and size % count == 0]
    count, dim = min(possible, default=(1, 0))
    return dim, count


def _wait(key: str, process: int) -> str:
    try:
        return get_text(key, _TIMEOUT_S)
    except TimeoutError as error:
        raise TimeoutError(
            f"process {jax.process_index()} waited {_TIMEOUT_S} s for process {process}: {error}"
        ) from None


def _differences(all_facts: Sequence[Mapping[str, str]]) -> list[str]:
    """One line per field that differs, with its values and the processes with each value."""
    lines = []
    for field in sorted(set().union(*all_facts)):
        values: dict[str, list[int]] = {}
        for process, facts in enumerate(all_facts):
            values.setdefault(facts.get(field, "(missing)"), []).append(process)
        if len(values) > 1:
            each = "; ".join(f"{value} on {processes_text(processes)}" for value, processes in values.items())
            lines.append(f"  {field}: {each}")
    return lines


def put_text(key: str, text: str, *, overwrite: bool = False) -> None:
    """Writes `text` under `key` for all processes. An existing key is an error, unless `overwrite` is set."""
    _client().key_value_set(f"{ROOT}/{key}", text, allow_overwrite=overwrite)


def get_text(key: str, timeout_s: float) -> str:
    """The text under `key`. Waits until a process has written it; raises a TimeoutError after `timeout_s` seconds."""
    try:
        return _client().blocking_key_value_get(f"{ROOT}/{key}", int(1000 * timeout_s))
    except jax.errors.JaxRuntimeError as error:
        if not says(error, "DEADLINE_EXCEEDED"):
            raise
        raise TimeoutError(f"no process has written {key} within {timeout_s:.0f} s") from error


def try_get_text(key: str) -> str | None:
    """The text under `key`, or None if it is not written yet."""
    try:
        return _client().key_value_try_get(f"{ROOT}/{key}")
    except jax.errors.JaxRuntimeError as error:
        if not says(error, "NOT_FOUND"):
            raise
        return None


def delete_texts(folder: str) -> None:
    """Deletes all keys below `folder`."""
    _client().key_value_delete(f"{ROOT}/{folder}/")


def call_number(name: str) -> int:
    """The number of calls with this `name` in this process, including this one.

    It is equal in all processes that make the same calls. As a part of a key it makes the keys of repeated collective
    operations unique, because each key can be written only once.
    """
    _calls[name] += 1
    return _calls[name]


def _client() -> Any:
    client = distributed_state().client
    if client is None:
        raise RuntimeError(
            "jax.distributed must be initialized to use its key-value store. Call jax.distributed.initialize() first."
        )
    return client
