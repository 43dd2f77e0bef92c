"""F, B and W of the stages of a pipeline, compiled for the devices of one group."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from flax_mesh.plan.recipe import Split
from flax_mesh.tree import PyTree


def compiled_stages(split: Split, mesh: Mesh, say: Callable[[str], None] = lambda text: None) -> dict[str, Compiled]:
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
