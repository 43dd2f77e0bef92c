"""What all processes of a run do together: compare facts, follow process 0, stop at one step, pass phases of a task."""

import json
from collections.abc import Callable, Mapping, Sequence

import jax

from flax_mesh.errors import CheckpointCorruptedError, ConfigError, PeerError
from flax_mesh.processes.store import call_number, delete_texts, get_text, put_text, try_get_text
from flax_mesh.text import processes_text

KINDS = {kind.__name__: kind for kind in (ConfigError, CheckpointCorruptedError)}  # errors raised in all processes
TIMEOUT_S = 600  # for the slowest process to come here: it may have a model to trace first
PHASE_TIMEOUT_S = 1200  # for the slowest process to end a phase
MARGIN_S = 60  # the others wait so much longer than process 0, which says who is late


def assert_equal(name: str, facts: Mapping[str, str]) -> None:
    """Every process calls it with its own `facts`; if they differ, ConfigError in all names fields and processes."""
    if jax.process_count() == 1:
        return
    name = f"{name}/{call_number(f'assert_equal {name}')}"
    put_text(f"assert_equal/{name}/{jax.process_index()}", json.dumps(dict(facts)))

    def differences() -> str:
        told = [json.loads(_wait(f"assert_equal/{name}/{process}", process)) for process in range(jax.process_count())]
        return "\n".join(_differences(told))

    if found := broadcast_from_process_0(f"assert_equal/{name}/differences", differences):
        repair = "Start all processes with the same code, recipe, settings, data and versions."
        raise ConfigError(["the processes of this run differ:", *found.split("\n"), repair])


def broadcast_from_process_0(name: str, decide: Callable[[], str]) -> str:
    """What `decide()` returns in process 0; its ConfigError or CheckpointCorruptedError is raised in all processes."""
    if jax.process_count() == 1:
        return decide()
    name = f"{name}/{call_number(f'broadcast_from_process_0 {name}')}"
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


class Phases:
    """One task `name` of the phases `phases`; every process makes it in the same order of calls, and passes or fails.

    Process 0 collects how each phase has ended and tells the others: 2 messages a process. Phases may be passed in
    several threads. In one process alone there is nobody to wait for.
    """

    def __init__(self, name: str, phases: Sequence[str]):
        self.phases = tuple(phases)
        self.together = jax.process_count() > 1
        self._index = jax.process_index()
        self._number = call_number(f"phases {name}")
        self._root = f"phases/{name}"
        self._ahead = list(phases)  # of which this process knows no end
        self._collected: set[str] = set()  # phases of which process 0 has told the others how they ended

    def passed(self, phase: str) -> None:
        """Return once all processes have come here; PeerError where one has failed before."""
        if self.together:
            problems = self._collect(phase) if self._index == 0 else self._report(phase)
            if problems:
                raise PeerError("; ".join(problems))
        self._ahead.remove(phase)
        if self.together and self._index == 0 and phase == self.phases[0]:
            delete_texts(f"{self._root}/{self._number - 1}")  # nobody asks for it any more: all have come here

    def is_past(self, phase: str) -> bool:
        return phase not in self._ahead

    def failed(self, reason: str) -> None:
        """Tell the others that it has failed here, `reason` in one line; waits for nobody."""
        text = json.dumps([reason])
        # What ended a phase stays as it was collected: a slow process may not have read it yet.
        for phase in (one for one in self._ahead if one not in self._collected) if self.together else ():
            put_text(self._key(phase, "all" if self._index == 0 else self._index), text, overwrite=True)

    def _collect(self, phase: str) -> list[str]:
        problems = []
        for process in range(1, jax.process_count()):
            try:
                problems += json.loads(get_text(self._key(phase, process), PHASE_TIMEOUT_S))
            except TimeoutError:
                problems.append(f"process {process} has not come to the end of {phase!r} within {PHASE_TIMEOUT_S} s")
        self._collected.add(phase)
        put_text(self._key(phase, "all"), json.dumps(problems), overwrite=True)
        return problems

    def _report(self, phase: str) -> list[str]:
        put_text(self._key(phase, self._index), "[]", overwrite=True)
        return json.loads(get_text(self._key(phase, "all"), PHASE_TIMEOUT_S + MARGIN_S))

    def _key(self, phase: str, who: int | str) -> str:
        return f"{self._root}/{self._number}/{phase}/{who}"


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
