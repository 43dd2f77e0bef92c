"""The forecast of a run that `flax-mesh train` prints at its start, and its comparison with the run."""

from collections.abc import Callable
from statistics import median
from threading import Thread
from typing import Any

from flax_mesh.data.user_batches import abstract_batch
from flax_mesh.plan.plan import Plan
from flax_mesh.plan.recipe import plan_program, plan_recipe
from flax_mesh.plan.report import compiled_line, forecast_line, measured_line
from flax_mesh.plan.topology import topology_of_devices
from flax_mesh.recipe.program import TrainProgram
from flax_mesh.recipe.resolve import retarget
from flax_mesh.recipe.target import chip_target
from flax_mesh.text import first_line
from flax_mesh.train.run_folder import Row


class Forecast:
    """Prints the plan of a run in one line, and collects the measurements of the rows.

    The speed of CPUs is not known, so their times are left out, unless `run.hardware` describes them. The plan is made
    in a thread while the first programs compile, or after the first step if its program need not be compiled. On GPUs
    it is made at once: it replaces tables of JAX that the trace of a step reads (see `kernels_without_devices`).
    """

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._plan: Plan | None = None
        self._program: TrainProgram | None = None
        self._is_timed = False
        self._device_bytes: int | None = None
        self._seconds: list[float] = []
        self._thread, self._after_step, self._is_lost = Thread(), False, False

    def __enter__(self) -> "Forecast":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_lost = kind is not None  # an error is the last line, and waits for nothing
        if kind is None:
            self._wait()

    def start(self, program: TrainProgram, *, after_step: bool) -> None:
        self._program, self._after_step = program, after_step
        self._thread = Thread(target=self._print, args=(program,), name="forecast", daemon=True)
        if program.mesh.devices.flat[0].platform == "gpu":
            self._after_step = False
            self._print(program)
        elif not after_step:
            self._thread.start()

    def row(self, row: Row) -> None:
        if not self._seconds and self._after_step:
            self._thread.start()
        elif not self._seconds:
            self._wait()  # the forecast precedes the row, which took longer: it includes compilation
        self._device_bytes = row.get("device_bytes")
        self._seconds.append(row["seconds"])

    def _wait(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _print(self, program: TrainProgram) -> None:
        try:
            self._plan = plan_of(program)
            self._is_timed = self._plan.topology.chip.platform != "cpu" or program.recipe.chip is not None
            text = forecast_line(self._plan.memory, self._plan.time if self._is_timed else None)
        except Exception as error:  # whatever the forecast fails with, the run itself may succeed
            reason = first_line(error)
            text = f"forecast: none ({': '.join(filter(None, [type(error).__name__, reason]))})"
        if not self._is_lost:
            self._say(text)

    def measured(self) -> list[str]:
        """The lines that compare the forecast with the run; none if nothing can be compared."""
        self._wait()
        if self._plan is None or self._program is None:
            return []
        steps = self._seconds[1:]  # the first one includes compilation
        seconds = median(steps) if steps and self._is_timed else None
        compiled = compiled_bytes(self._program) if self._seconds else None
        lines = measured_line(self._plan.memory, self._plan.time, self._device_bytes, seconds)
        return lines if compiled is None else [*lines, compiled_line(self._plan.memory, *compiled)]


def compiled_bytes(program: TrainProgram) -> tuple[int, int] | None:
    """Bytes of the arguments and of the temporaries of the step that has run, on one device, as XLA states them.

    None for a pipeline, whose step is many programs, and where the step has limits as a third argument. JAX returns the
    program that it has compiled for the run.
    """
    recipe = program.recipe
    if program.pipeline is not None or (recipe.step_options.skip_nonfinite and recipe.run.spike_factor):
        return None
    batch = abstract_batch(recipe.batch, program.mesh, program.rules.axes)
    step: Any = program.step
    memory = step.lower(program.layout, batch).compile().memory_analysis()
    if memory is None:
        return None
    # On CPUs, arguments in the memory of the host count as the others.
    return memory.argument_size_in_bytes + memory.host_argument_size_in_bytes, memory.temp_size_in_bytes


def plan_of(program: TrainProgram) -> Plan:
    """The plan on the mesh and the devices of the run, which may be fewer than `mesh.shape` and than those here."""
    recipe, mesh = program.recipe, program.mesh
    topology = topology_of_devices(list(mesh.devices.flat), recipe.chip)
    if program.pipeline is None:
        return plan_program(program, topology)
    return plan_recipe(retarget(recipe, chip_target(mesh.shape, topology.chip)), topology)
