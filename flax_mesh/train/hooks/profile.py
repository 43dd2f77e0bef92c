"""`run.profile`: a trace of a few steps by jax.profiler, in RUN_FOLDER/profile."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import jax

from flax_mesh.text import one_line

FOLDER = "profile"
FIRST = 2  # steps of this run before the first one that is recorded: they include compilation


class Profile:
    """Records the steps `first` to `last` of a run, counted from 1; none if `steps` is 0."""

    def __init__(self, folder: Path, steps: int, start: int, say: Callable[[str], None]):
        self._folder, self._say = folder / FOLDER, say
        self._steps = range(start + FIRST + 1, start + FIRST + 1 + steps)
        self._is_recording = False

    def step(self, step: int) -> AbstractContextManager[object]:
        """Context of the dispatch of a step."""
        if step not in self._steps:
            return nullcontext()
        if step == self._steps[0]:
            with self._warned():
                jax.profiler.start_trace(str(self._folder))  # pyright: ignore[reportUnknownMemberType] (of JAX)
                self._is_recording = True
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def ends_after(self, step: int) -> bool:
        """Whether the step, once the devices have finished it, is the last one to be recorded."""
        return self._is_recording and step == self._steps[-1]

    def close(self) -> None:
        if not self._is_recording:
            return
        self._is_recording = False
        with self._warned():
            jax.profiler.stop_trace()  # pyright: ignore[reportUnknownMemberType] (of JAX)
            self._say(f"profile: {self._folder}; to open it: xprof --logdir {self._folder}")

    @contextmanager
    def _warned(self) -> Generator[None]:
        """A failure of the profiler is a line of output: the run goes on without a profile."""
        try:
            yield
        except (OSError, RuntimeError) as error:  # JaxRuntimeError, or RuntimeError if another profile is recorded
            text = one_line(error)
            self._say(f"warning: run.profile: nothing is recorded in {self._folder}: {text}")


def profile_problem(steps: int, start: int, last: int) -> str:
    """Why a run from `start` to `last` completed steps cannot record so many steps, "" if it can."""
    if not steps or last - start >= FIRST + steps:
        return ""
    return (
        f"run.profile={steps} records the steps {start + FIRST + 1} to {start + FIRST + steps}, but run.steps={last} "
        "ends before that; increase run.steps, or record fewer steps"
    )
