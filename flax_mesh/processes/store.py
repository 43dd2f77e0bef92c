"""The key-value store of jax.distributed, which all processes share: short texts, each written once by default."""

from collections import Counter
from typing import Any

import jax

from flax_mesh.jax_compat import distributed_state
from flax_mesh.text import says

ROOT = "flax_mesh"
_calls: Counter[str] = Counter()  # global, because jax.distributed is global to a process


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
