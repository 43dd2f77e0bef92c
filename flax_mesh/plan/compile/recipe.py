"""`compile_recipe`: the step of a recipe, compiled in a separate process.

libtpu reads its environment when it is loaded, and may abort the process. So the other process builds the step
from the name of the recipe and its overrides: the functions of a config cannot be passed to it.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types
from flax_mesh.plan.compile.child import ask
from flax_mesh.plan.compile.compiled import Compiled
from flax_mesh.plan.compile.report import estimate_findings
from flax_mesh.plan.compile.results import program_of, sent_of
from flax_mesh.plan.compile.target import check_target
from flax_mesh.plan.plan import Plan
from flax_mesh.plan.recipe import named_topology, plan
from flax_mesh.recipe.load import load_recipe
from flax_mesh.recipe.overrides import apply_overrides, setting_of
from flax_mesh.sharding.rules import Finding

LIMIT_S = 600.0
WITHOUT_CUDNN = {"model.attention": "xla", "run.attention": "blockwise"}
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
USED = re.compile(r"(?:[Uu]sed |\()([\d.]+)([KMGT])\b")


@check_types
def compile_recipe(
    recipe: str,
    overrides: Sequence[str],
    topology: str,
    *,
    limit: float = LIMIT_S,
    say: Callable[[str], None] = lambda text: None,
) -> Compiled:
    """Compile the training step of a recipe for hardware that need not be here.

    A pipeline is compiled stage by stage, for a topology of the shape of one group. XLA compiles in another process,
    which builds the config from `recipe` and `overrides`; a config that was made in Python cannot be passed.

    Args:
        recipe: FILE.py or FILE.py:function.
        overrides: Settings, such as "mesh.shape=fsdp:8".
        topology: A text such as "v5p:4x4x8". TPUs require the extra `tpu-aot`, GPUs `gpu-aot`; for GPUs
            `model.attention=auto` is xla and `run.attention=auto` is blockwise, because JAX lowers cuDNN's attention
            with devices only.
        limit: Seconds after which the process is killed.
        say: Called with each part of the work, such as "compiling".

    Returns:
        A `Compiled`: memory, the largest arrays, collectives, findings, beside the `Plan`.

    Raises:
        ConfigError: The settings are invalid, the compiler is not installed, it failed, or it took longer than `limit`.

    Example:
        >>> from flax_mesh.plan.compile import compile_recipe
        >>> found = compile_recipe("recipes/tiny.py", ["model.scan=true"], "cpu:8")
        >>> found.fits
        True
    """
    if not (math.isfinite(limit) and limit > 0):
        raise ConfigError(f"the limit must be a positive number of seconds, got {limit}")
    config = apply_overrides(load_recipe(recipe), overrides)
    check_target(hardware := named_topology(topology, config.run.hardware))
    if hardware.chip.platform == "gpu":
        given = {"model.attention": getattr(config.model, "attention", ""), "run.attention": config.run.attention}
        other = {name: WITHOUT_CUDNN[name] for name, value in given.items() if value == "auto"}
        overrides = [text for text in overrides if setting_of(text) not in other]
        overrides += [f"{name}={value}" for name, value in other.items()]
        config = apply_overrides(load_recipe(recipe), overrides)
    estimated = plan(config, hardware)
    request = {
        "recipe": recipe,
        "overrides": list(overrides),
        "topology": estimated.topology.text,
        "mesh": estimated.mesh,
    }
    key, value = ask(request, estimated.topology, limit, say)
    return _refused(estimated, value) if key == "refused" else _compiled(estimated, value)


def _compiled(estimated: Plan, answer: dict[str, Any]) -> Compiled:
    programs, sent, peak = tuple(map(program_of, answer["programs"])), sent_of(answer["sent"]), answer["peak"]
    findings = [*(Finding(*each) for each in answer["findings"]), *estimate_findings(peak, sent, estimated)]
    return Compiled(estimated, programs, peak, tuple(answer["groups"]), sent, tuple(findings), *_cost(answer))


def _refused(estimated: Plan, answer: dict[str, Any]) -> Compiled:
    """The compiler for TPUs has no program for a step that does not fit, but states how much it would use."""
    used = USED.search(answer["text"])
    peak = round(float(used[1]) * UNITS[used[2]]) if used else 0
    text = " ".join(answer["text"].split())[:300]
    finding = Finding("memory", f"the compiler has no program: {text}", "Use more devices, or see the plan's findings")
    return Compiled(estimated, (), peak, (peak,), (), (finding,), *_cost(answer))


def _cost(answer: dict[str, Any]) -> tuple[float, float, int]:
    return answer["seconds"], answer["cpu_seconds"], answer["rss"]
