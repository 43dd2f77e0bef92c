"""The process that compiles: one line of JSON on standard input, lines of JSON on standard output.

    python -m flax_mesh.plan.compile.worker

Lines have one key: "progress" (a text), then "result", "refused" (the compiler's reason why the step does not fit) or
"error". The process ends when standard input does, so that none outlives its parent.
"""

import json
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from flax_mesh.errors import ConfigError
from flax_mesh.plan.compile.read import Reading, read_program, rematerialized
from flax_mesh.plan.compile.results import CompiledProgram, Sent, summed
from flax_mesh.plan.compile.target import devices_target
from flax_mesh.plan.forecast import Estimate
from flax_mesh.plan.pipeline import StageEstimate, pipeline_memory
from flax_mesh.plan.recipe import Split, arguments_of, named_topology, split_recipe
from flax_mesh.plan.report import ranges
from flax_mesh.plan.topology import Topology
from flax_mesh.recipe.load import load_recipe
from flax_mesh.recipe.overrides import apply_overrides
from flax_mesh.recipe.program import train_program
from flax_mesh.recipe.resolve import Recipe, derive
from flax_mesh.recipe.target import chip_target
from flax_mesh.sharding.memory import is_on_host
from flax_mesh.text import plain_data, plural
from flax_mesh.tree import PyTree, named_leaves, shard_bytes

Progress = Callable[[str], None]
Readings = tuple[list[Reading], dict[str, object]]  # the programs, and the figures of the step
FRAMES = 40  # of the stack of each operation, so that the path of modules is complete
OUT_OF_MEMORY = re.compile("RESOURCE_EXHAUSTED.*out of memory (on|in memory space) hbm", re.IGNORECASE | re.DOTALL)


def main() -> None:
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the output of a recipe is not part of the answer

    def say(key: str, value: object) -> None:
        print(json.dumps({key: value}), file=output, flush=True)

    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    start = time.monotonic()
    try:
        answer = compile_request(request, lambda text: say("progress", text))
        say("result", answer | _usage(start))
    except ConfigError as error:
        say("error", error.lines)
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if OUT_OF_MEMORY.match(text):
            say("refused", {"text": text, **_usage(start)})
        else:
            say("error", text)


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


def compile_request(request: Mapping[str, Any], progress: Progress) -> dict[str, object]:
    """The compiled programs and the figures of a step, as data for `json.dumps`."""
    jax.config.update("jax_traceback_in_locations_limit", FRAMES)
    config = apply_overrides(load_recipe(request["recipe"]), request["overrides"])
    topology, sizes = named_topology(request["topology"], config.run.hardware), dict(request["mesh"])
    target = devices_target(topology, sizes)
    if "pp" in sizes:
        recipe = derive(config, chip_target(sizes, topology.chip))
        readings, figures = _pipeline(recipe, topology, target.device_mesh(config.mesh.axis_types), progress)
    else:
        readings, figures = _step(derive(config, target), topology, progress)
    messages = Path(request["messages"]).read_text(encoding="utf-8", errors="replace")
    findings = rematerialized(messages, [reading.program for reading in readings])
    findings += [each for reading in readings for each in reading.findings]
    programs = [reading.figures for reading in readings]
    return plain_data({**figures, "programs": programs, "findings": [tuple(x) for x in dict.fromkeys(findings)]})


def _usage(start: float) -> dict[str, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": time.monotonic() - start,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "rss": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }


def _step(recipe: Recipe, topology: Topology, progress: Progress) -> Readings:
    progress("tracing")
    program = train_program(recipe)
    traced = program.step.trace(*arguments_of(program))
    progress("lowering")
    lowered = traced.lower()
    progress("compiling")
    compiled = lowered.compile()
    progress("reading the program")
    leaves = [path for path, _ in named_leaves(program.layout.to_nnx())]

    def path_of(name: str, number: int) -> str:
        return leaves[number] if name == "state.leaves" and number < len(leaves) else ""

    layout = zip(leaves, program.layout.leaves, strict=True)
    hosted = {path: shard_bytes(x) for path, x in layout if is_on_host(x)}
    reading = read_program(compiled, "step", 1, program.mesh, topology.chip.platform, path_of, hosted)
    step = reading.figures
    return [reading], {"peak": step.peak, "groups": [step.peak], "sent": step.sent}


def _pipeline(recipe: Recipe, topology: Topology, mesh: Mesh, progress: Progress) -> Readings:
    progress("tracing")
    split = split_recipe(recipe)
    estimates = split.estimates(topology.chip.platform)
    compiled = compiled_stages(split, mesh, progress)
    progress("reading the programs")
    names_of: dict[int, list[str]] = {}
    for name, program in compiled.items():
        names_of.setdefault(id(program), []).append(name)
    readings = {
        key: read_program(
            compiled[names[0]],
            *_named(names, split),
            mesh,
            topology.chip.platform,
            partial(_argument_of_stage, names[0][0]),
        )
        for key, names in names_of.items()
    }
    programs = {name: readings[id(program)].figures for name, program in compiled.items()}
    stages = [_with_xla(stage, k, programs) for k, stage in enumerate(estimates)]
    memory = pipeline_memory(topology, split.schedule, stages, split.sizes, None)
    return list(readings.values()), {
        "peak": memory.peak,
        "groups": memory.groups,
        "sent": _sent(split, programs),
    }


def compiled_stages(split: Split, mesh: Mesh, say: Progress = lambda text: None) -> dict[str, Compiled]:
    """ "F0", "B0" and so on -> the compiled program; equal stages are one program, under the name of the first.

    `mesh` is the mesh of one group. Stages are compiled in order: the arguments of a program have the shardings with
    which XLA returned them before.
    """

    def make(kind: str, number: int, function: Any, arguments: tuple[PyTree, ...]) -> tuple[Compiled, PyTree]:
        say(f"compiling {kind} of stage {number} (of stages 0-{split.schedule.num_stages - 1})")
        lowered = function.lower(*arguments)
        program = lowered.compile()
        results = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            lowered.out_info,
            program.output_shardings,
        )
        return program, results

    return {f"{kind}{number}": program for (kind, number), program in split.visit(mesh, make).programs.items()}


def _named(names: Sequence[str], split: Split) -> tuple[str, int]:
    """`F of stages 1-3` and the executions per step, on the group that runs it most."""
    numbers = sorted(int(name[1:]) for name in names)
    groups = [split.schedule.stage_to_group[number] for number in numbers]
    times = max(groups.count(group) for group in groups) * split.schedule.num_microbatches
    return f"{names[0][0]} of {plural('stage', len(numbers))} {ranges(numbers)}", times


KNOWN = ("leaf", "rows of the batch", "number of the microbatch", "activation of the stage before")
ARGUMENTS = {
    "F": (*KNOWN, "sum of a metric"),
    "B": (*KNOWN, "residual", "gradient of the stage after", "sum of gradients"),
    "W": (*KNOWN, "residual", "gradient of the stage after", "value from B", "sum of gradients"),
}


def _argument_of_stage(kind: str, name: str, at: int, number: int = 0) -> str:
    """`residual 3`, for `args[4][3]` of B."""
    return f"{ARGUMENTS[kind][at]} {number}" if name == "args" and at < len(ARGUMENTS[kind]) else ""


def _with_xla(stage: StageEstimate, number: int, programs: Mapping[str, CompiledProgram]) -> StageEstimate:
    """The estimate of a stage with the temporary bytes of its compiled programs."""

    def corrected(kind: str, estimated: Estimate) -> Estimate:
        compiled = programs[f"{kind}{number}"]
        return replace(estimated, profile=replace(estimated.profile, peak=compiled.peak - compiled.arguments))

    return stage._replace(
        forward=corrected("F", stage.forward),
        backward=corrected("B", stage.backward),
        weights=None if stage.weights is None else corrected("W", stage.weights),
    )


def _sent(split: Split, programs: Mapping[str, CompiledProgram]) -> list[Sent]:
    """The collectives of the busiest group per step."""
    groups: list[list[Sent]] = [[] for _ in range(split.schedule.num_groups)]
    for name, program in programs.items():
        groups[split.schedule.stage_to_group[int(name[1:])]] += program.sent
    sums = [sorted(summed(sends, split.schedule.num_microbatches)) for sends in groups]
    return max(sums, key=lambda rows: sum(row.operand_bytes for row in rows))


if __name__ == "__main__":
    main()
