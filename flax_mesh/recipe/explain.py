"""A report on a recipe before training, without devices: the sharding of its arrays, and its pipeline stages."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from dataclasses import replace

from flax_mesh.blockwise.transform import BLOCK
from flax_mesh.data.user_batches import abstract_batch
from flax_mesh.errors import Problem
from flax_mesh.jax_compat import kernels_without_devices
from flax_mesh.mpmd import CutError
from flax_mesh.mpmd.split.split import bytes_of_groups
from flax_mesh.recipe.checks import check_on_mesh, sequence_length_of
from flax_mesh.recipe.config import TrainConfig
from flax_mesh.recipe.model import method_of, model_notes
from flax_mesh.recipe.program import attention_lines, eval_shape, split_model, train_program
from flax_mesh.recipe.resolve import Recipe, check, derive
from flax_mesh.recipe.target import abstract_target
from flax_mesh.sharding import Explanation
from flax_mesh.sharding.report.explain import explain_sharding
from flax_mesh.sharding.rules import Finding
from flax_mesh.text import bytes_text, count_text
from flax_mesh.tree import MODEL, OPTIMIZER
from flax_mesh.user_code import place_of, user_code


def explain(config: TrainConfig) -> Explanation:
    """Explain the sharding of every array of the recipe's model and optimizer on `mesh.shape`, and list all findings.

    With pp > 1 the report is for the mesh of one group as if it stored the arrays of all stages; the note lists the
    stages and the bytes that each group stores. `run.platform` is read only if `mesh.shape` contains -1: it then must
    be `cpu:N`, for N devices. Raises ConfigError for invalid settings; dims that are not divisible by their mesh
    axes are findings. A model that needs an accelerator to be traced, as with `model.attention=cudnn`, is
    explained as `without_devices()` of its config returns it: its arrays are the same.

    Example:
        >>> from flax_mesh.recipe import explain
        >>> from flax_mesh.train import load_recipe
        >>> explain(load_recipe("recipes/tiny.py")).findings
        ()
    """
    check(config)
    target, given = abstract_target(config.mesh, config.run.platform), config.model
    config = replace(config, model=method_of(given, "without_devices", lambda: given)())
    recipe = derive(config, target, None if target.num_groups > 1 or config.make_batches is None else {})
    notes = model_notes(given, recipe.mesh, sequence_length_of(config))
    rules = config.mesh.rules or config.rules  # None for the table of the model, whose unused rules are not reported
    layout = replace(recipe.layout, rules=rules, axes=None)
    explanation = explain_sharding(recipe.make, recipe.mesh, **vars(layout))
    problems = check_on_mesh(config, recipe.mesh, explanation.axes)
    settings = [_setting_finding(problem) for problem in problems]
    note, unsplit = ("", []) if settings else _stages(recipe, explanation)
    lines = _attention_lines(recipe) if recipe.schedule is None and not settings else ()
    note = "\n".join([*notes, *lines, note] if note else [*notes, *lines])
    return explanation._replace(findings=(*settings, *unsplit, *explanation.findings), note=note)


def _attention_lines(recipe: Recipe) -> tuple[str, ...]:
    """The effect of run.attention, from a trace of the step; sequences shorter than a block stay as they are."""
    if not recipe.batch or recipe.user_batches is not None or recipe.data.sequence_length < BLOCK:
        return ()
    program = train_program(recipe)
    with kernels_without_devices(), user_code("loss_fn", place_of(recipe.loss_fn)):
        eval_shape(program.step, program.layout, abstract_batch(recipe.batch, recipe.mesh, recipe.rules.axes))
    return attention_lines(program)


def _stages(recipe: Recipe, explanation: Explanation) -> tuple[str, list[Finding]]:
    """(note, findings): the stages and bytes of every group, or why the model cannot be split into these stages."""
    if (schedule := recipe.schedule) is None:
        return "", []
    try:
        staged = split_model(recipe, recipe.mesh)  # pyright: ignore[reportArgumentType] (abstract, of one group)
    except CutError as error:
        return "", [Finding("pipeline", str(error), "Change pipeline.cut or mesh.shape")]
    parts = [OPTIMIZER if leaf.kind == "optimizer" else MODEL for leaf in explanation.report.leaves]
    named = [(part + x.path, x) for part, x in zip(parts, explanation.report.leaves, strict=True)]
    both = [[(path, x, x.device_bytes * (x.on_host == host)) for path, x in named] for host in (False, True)]
    sizes, on_host = (bytes_of_groups(staged, schedule.stage_to_group, leaves) for leaves in both)
    lines = [
        f"pipeline: {schedule.name} over {recipe.num_groups} groups of this mesh (pp), "
        f"{count_text(schedule.num_microbatches, 'microbatch')}; "
        "the table below is for one group as if it stored all arrays",
        *(
            f"group {group} stores {bytes_text(size)} per device"
            + (f", and {bytes_text(host)} for it in the memory of the host" if host else "")
            for group, (size, host) in enumerate(zip(sizes, on_host, strict=True))
        ),
        str(staged),
    ]
    return "\n".join(lines), []


def _setting_finding(problem: Problem) -> Finding:
    setting = f"{problem.setting}={problem.value}" if problem.value else problem.setting
    repair = problem.repair[:1].upper() + problem.repair[1:]
    return Finding(setting, problem.text.removeprefix("is "), repair)
