"""A task that all processes do in phases: what fails in one fails in all, at the end of the same phase."""

import json
from collections.abc import Sequence

import jax

from flax_mesh.errors import PeerError
from flax_mesh.processes.store import call_number, delete_texts, get_text, put_text

TIMEOUT_S = 1200  # for the slowest process to end a phase
MARGIN_S = 60  # the others wait so much longer than process 0, which says who is late


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
        """Whether all have passed it."""
        return phase not in self._ahead

    def failed(self, reason: str) -> None:
        """Tell the others that it has failed here, `reason` in one line; waits for nobody."""
        text = json.dumps([reason])
        for phase in self._ahead if self.together else ():
            put_text(self._key(phase, "all" if self._index == 0 else self._index), text, overwrite=True)

    def _collect(self, phase: str) -> list[str]:
        problems = []
        for process in range(1, jax.process_count()):
            try:
                problems += json.loads(get_text(self._key(phase, process), TIMEOUT_S))
            except TimeoutError:
                problems.append(f"process {process} has not come to the end of {phase!r} within {TIMEOUT_S} s")
        put_text(self._key(phase, "all"), json.dumps(problems), overwrite=True)
        return problems

    def _report(self, phase: str) -> list[str]:
        put_text(self._key(phase, self._index), "[]", overwrite=True)
        return json.loads(get_text(self._key(phase, "all"), TIMEOUT_S + MARGIN_S))

    def _key(self, phase: str, who: int | str) -> str:
        return f"{self._root}/{self._number}/{phase}/{who}"
