"""Threads in place of processes: each has a different number, and all share a key-value store in memory."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax

from flax_mesh.processes import agree, watchdog
from tests.multiprocess.processes import TIME_LIMIT_S


class Texts:
    """The methods of the client of jax.distributed that `flax_mesh.processes.agree` calls, with its errors."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, text: str, *, allow_overwrite: bool) -> None:
        with self.changed:
            if key in self.texts and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.texts[key] = text
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, limit_ms: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.texts, limit_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.texts[key]

    def key_value_try_get(self, key: str) -> str:
        if key not in self.texts:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.texts[key]

    def key_value_delete(self, folder: str) -> None:
        with self.changed:
            self.texts = {key: text for key, text in self.texts.items() if not key.startswith(folder)}


class Calls(threading.local):
    """The counters of `call_number`, one set per thread."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __getitem__(self, name: str) -> int:
        return self.counts[name]

    def __setitem__(self, name: str, count: int) -> None:
        self.counts[name] = count


def in_threads(monkeypatch: Any, count: int, function: Callable[[int], Any]) -> list[Any]:
    """`function(number)` in `count` threads that count as processes; the results or SystemExits, by number."""
    number, texts, calls = threading.local(), Texts(), Calls()
    state = SimpleNamespace(client=texts, coordinator_address="127.0.0.1:1")
    for module in (agree, watchdog):
        monkeypatch.setattr(module, "distributed_state", lambda: state)
    monkeypatch.setattr(agree, "_calls", calls)
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(jax, "process_index", lambda: number.value)

    def run(own: int) -> Any:
        number.value = own
        calls.counts.clear()  # the pool may use a thread again
        with contextlib.suppress(SystemExit):
            return function(own)

    with ThreadPoolExecutor(count) as pool:
        return [one.result(TIME_LIMIT_S) for one in [pool.submit(run, own) for own in range(count)]]
