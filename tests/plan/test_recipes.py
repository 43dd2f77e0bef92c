"""The recipes for models of real size: their parameters, and the commands of their docstrings."""

import ast
import math
import shlex
from pathlib import Path

import jax
import pytest
from flax import nnx

from flax_mesh.cli.text.forecast import compiled_bytes
from flax_mesh.plan import plan
from flax_mesh.plan.search.search import parse_chips
from flax_mesh.plan.topology import resolve_mesh
from flax_mesh.recipe.program import build_program
from flax_mesh.recipe.resolve import maker
from flax_mesh.recipe.target import axis_sizes, without_groups
from flax_mesh.train import apply_overrides, load_recipe

ROOT = Path(__file__).parents[2]


def plan_commands(path: Path) -> list[list[str]]:
    """The words after `flax-mesh` of every `flax-mesh plan` command in the docstring of a recipe."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("flax-mesh plan ")]


COMMANDS = [words for name in ("llama3", "qwen3") for words in plan_commands(ROOT / "recipes" / f"{name}.py")]


@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [
        ("llama3.py:llama3_8b", 8_030_261_248),
        ("llama3.py:llama3_70b", 70_553_706_496),
        ("llama3.py:llama3_405b", 405_853_388_800),
        ("qwen3.py:qwen3_30b_a3b", 30_532_122_624),
    ],
)
def test_the_models_have_the_published_number_of_parameters(recipe, parameters):
    config = load_recipe(str(ROOT / "recipes" / recipe))
    state = nnx.eval_shape(lambda: nnx.state(maker(config)(), nnx.Param))
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(state)) == parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "batch", "topology"), [("llama3_70b", 256, "v5p-512"), ("llama3_405b", 512, "v5p:512")]
)
def test_a_large_model_is_planned_without_a_mesh(function, batch, topology):
    config = load_recipe(str(ROOT / "recipes" / f"llama3.py:{function}"))
    found = plan(apply_overrides(config, [f"data.batch_size={batch}"]), topology := parse_chips(topology))
    assert found.fits and found.mesh["fsdp"] == topology.num_devices == batch


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tiny.py", "tiny_moe.py", "vit.py"])
def test_the_memory_of_a_small_recipe_is_close_to_the_compiled_step(recipe):
    """encoder_decoder.py is at -38%: XLA combines sums."""
    config = load_recipe(str(ROOT / "recipes" / recipe))
    assert plan(config).memory.peak == pytest.approx(sum(compiled_bytes(build_program(config)) or ()), rel=0.1)


@pytest.mark.parametrize("function", ["llama3_8b", "llama3_70b", "llama3_405b"])
def test_the_mesh_of_a_recipe_is_all_devices_of_any_topology(function):
    sizes = without_groups(axis_sizes(load_recipe(str(ROOT / "recipes" / f"llama3.py:{function}")).mesh))
    assert resolve_mesh(parse_chips("v5p-512"), sizes) == {**sizes, "fsdp": 256}


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS, ids=shlex.join)
def test_the_documented_commands_are_planned_and_fit_also_405b_parameters_on_8192_chips(words):
    at = words.index("--topology")
    found = plan(apply_overrides(load_recipe(words[1]), words[2:at]), words[at + 1])
    assert found.fits and not found.findings
    if "llama3_405b" in words[1]:
        assert found.topology.num_devices == 8192
        assert found.time.mfu is not None and 0.2 < found.time.mfu < 0.8
        norms = 253 * 16384  # their scales are replicated; the others are split over fsdp and tp, and dp copies them
        assert found.memory.arguments == pytest.approx(12 * (norms + (405_853_388_800 - norms) / 4096), rel=0.001)


def test_the_commands_of_both_recipes_are_found():
    assert len(COMMANDS) == 8 and sum("llama3_405b" in words[1] for words in COMMANDS) == 1
    assert plan_commands(ROOT / "recipes" / "tiny.py") == []
