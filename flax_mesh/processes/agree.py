"""What all processes of a run must have in common, and decisions that one of them takes for all."""

import json
from collections.abc import Callable, Mapping, Sequence

import jax

from flax_mesh.errors import CheckpointCorruptedError, ConfigError
from flax_mesh.processes.store import call_number, get_text, put_text, try_get_text
from flax_mesh.text import processes_text

KINDS = {
    kind.__name__: kind for kind in (ConfigError, CheckpointCorruptedError)
}  # of errors that are raised in all processes
TIMEOUT_S = 600  # for the slowest process to come here: it may have a model to trace first


def agree(name: str, facts: Mapping[str, str]) -> None:
    """Every process calls it with its own `facts`. ConfigError in all of them, naming fields and processes, unless all
    have the same."""
    if jax.process_count() == 1:
        return
    name = f"{name}/{call_number(f'agree {name}')}"
    put_text(f"agree/{name}/{jax.process_index()}", json.dumps(dict(facts)))

    def differences() -> str:
        told = [_told(name, process) for process in range(jax.process_count())]
        return "\n".join(_differences(told))

    found = from_first(f"agree/{name}/differences", differences)
    if found:
        raise ConfigError(["the processes of this run differ:", *found.split("\n"), _REPAIR])


def from_first(name: str, decide: Callable[[], str]) -> str:
    """What `decide()` gives in process 0, in every process; its ConfigError or CheckpointCorruptedError is raised in
    all."""
    if jax.process_count() == 1:
        return decide()
    name = f"{name}/{call_number(f'from_first {name}')}"
    if jax.process_index() != 0:
        answer = json.loads(_wait(f"first/{name}", 0))
        if "problems" in answer:
            raise KINDS[answer["kind"]]([f"process 0: {problem}" for problem in answer["problems"]])
        return answer["value"]
    try:
        value = decide()
    except ConfigError as error:
        put_text(f"first/{name}", json.dumps({"kind": type(error).__name__, "problems": error.problems}))
        raise
    put_text(f"first/{name}", json.dumps({"value": value}))
    return value


def stop_together(should_stop: Callable[[], bool], name: str = "stop") -> Callable[[], bool]:
    """A function for every process to call once a step: true in all of them after the same step, soon after
    `should_stop` was true in one.

    Each call must come after the step before the last one is known to have ended in all processes, as it has where its
    metrics were read. Process 0 names a step two calls ahead; nobody can have passed that one.
    """
    if jax.process_count() == 1:
        return should_stop
    name = f"{name}/{call_number(name)}"
    first, calls, last = jax.process_index() == 0, 0, 0

    def stop() -> bool:
        nonlocal calls, last
        calls += 1
        if not last and first and (should_stop() or try_get_text(f"{name}/wish") is not None):
            last = calls + 2
            put_text(f"{name}/after", str(last))
        elif not last and not first:
            last = int(try_get_text(f"{name}/after") or 0)
            if not last and should_stop():
                put_text(f"{name}/wish", "please", overwrite=True)
        return bool(last) and calls >= last

    return stop


_REPAIR = "Start all processes with the same code, recipe, settings, data and versions."


def _told(name: str, process: int) -> dict[str, str]:
    return json.loads(_wait(f"agree/{name}/{process}", process))


def _wait(key: str, process: int) -> str:
    try:
        return get_text(key, TIMEOUT_S)
    except TimeoutError as error:
        raise TimeoutError(
            f"process {jax.process_index()} waited {TIMEOUT_S} s for process {process}: {error}"
        ) from None


def _differences(told: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for every field, with its values and who has them."""
    found = []
    for field in sorted(set().union(*told)):
        values: dict[str, list[int]] = {}
        for process, facts in enumerate(told):
            values.setdefault(facts.get(field, "(nothing)"), []).append(process)
        if len(values) > 1:
            each = "; ".join(f"{value} on {processes_text(who)}" for value, who in values.items())
            found.append(f"  {field}: {each}")
    return found
