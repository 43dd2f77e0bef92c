"""`plan` and `plan_step`: one walk under both, and what they accept."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mesh.errors import ConfigError
from flax_mesh.mpmd.runtime.search import SEARCHED
from flax_mesh.plan import plan, plan_step
from flax_mesh.train import MeshConfig, PipelineConfig, apply_overrides, load_recipe
from tests.plan.cases import PLANNED

MESH = AbstractMesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
REPLICATED = P()


def array(*shape: int, spec: P = REPLICATED, mesh: AbstractMesh = MESH, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def test_a_custom_step_is_planned_with_its_collectives():
    arguments = array(512, 256, spec=P("tp")), array(64, 512, spec=P("dp", "tp"))
    found = plan_step(jax.jit(lambda w, x: x @ w), arguments, "v5e:2x4")
    (reduced,) = found.traffic
    assert (reduced.kind, reduced.axes, reduced.operand_bytes) == ("all-reduce", ("tp",), 64 // 4 * 256 * 2)
    assert found.memory.arguments == (256 * 256 + 16 * 256) * 2
    assert found.time.flops == 2 * 16 * 256 * 256
    assert found.time.mfu is None and found.time.tokens_per_s is None

    found = plan_step(jax.jit(lambda w, x: x @ w), arguments, "v5e:2x4", tokens=1000, flops=1e9)
    assert found.time.tokens_per_s == pytest.approx(1000 / found.time.seconds)
    assert found.time.mfu == pytest.approx(1e9 / found.time.seconds / (8 * 197e12))


def test_unused_arguments_are_dropped_as_in_jax_and_a_step_without_operations_has_a_plan():
    found = plan_step(jax.jit(lambda x, unused: x + 1), (array(8, 8), array(64, 64)), "v5e:2x4")
    assert found.memory.arguments == 8 * 8 * 2
    found = plan_step(jax.jit(lambda x: x), (array(8, 8),), "v5e:2x4")
    assert found.time.seconds == 0 and found.memory.peak >= 8 * 8 * 2
    assert found.to_text() and found.to_dict()


def test_a_loop_of_unknown_length_is_a_finding():
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() < 10, lambda x: x @ x, x)

    (finding,) = plan_step(jax.jit(step), (array(64, 64),), "v5e:2x4").findings
    assert "trip count of this loop is not known" in finding.problem


def own_step(*arguments: jax.ShapeDtypeStruct):
    return plan_step(jax.jit(lambda *x: x), arguments, "v5e:2x4")


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: own_step(jax.ShapeDtypeStruct((8,), jnp.float32)), "on one mesh, but they have 0 meshes"),
        (lambda: own_step(array(8), array(8, mesh=AbstractMesh((8,), ("x",)))), "on one mesh, but they have 2 meshes"),
        (lambda: own_step(array(8, mesh=AbstractMesh((4,), ("x",)))), "multiply to 4, not to 8"),
        (lambda: plan(PLANNED, "v9:2x4"), "v9"),
        (lambda: plan(PLANNED, "v5e:2x2"), "multiply to 8, not to 4"),
        (lambda: plan(replace(PLANNED, data=replace(PLANNED.data, batch_size=30)), "v5e:2x4"), "data.batch_size"),
    ],
)
def test_recipes_that_cannot_be_planned_are_refused_in_one_line(call, problem):
    with pytest.raises(ConfigError, match=problem) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_pipeline_has_a_bubble_and_the_flops_of_the_plain_step():
    staged = replace(PLANNED, mesh=MeshConfig("pp:2,fsdp:4"), pipeline=PipelineConfig(num_microbatches=4))
    found, plain = plan(staged, "v5e:2x4"), plan(replace(PLANNED, mesh=MeshConfig("fsdp:8")), "v5e:2x4")
    assert 0 < found.time.bubble < 0.5 and found.time.schedule is not None
    assert len(found.memory.groups) == 2 and found.memory.peak == max(found.memory.groups)
    assert found.time.flops == pytest.approx(plain.time.flops, rel=0.1)
    assert any(each.axes == ("pp",) for each in found.traffic)


def test_a_plan_of_a_search_has_the_schedule_that_is_found_and_the_flops_of_one_device():
    """Muon multiplies matrices: the update has a sixth of the FLOPs, and each device its part of it."""
    settings = ["mesh.shape=pp:2,fsdp:1", "pipeline.num_microbatches=2", "pipeline.schedule=search"]
    settings += ["model.num_layers=2", "run.eval_every=0", "run.sample_tokens=0", "optimizer.name=muon"]
    time = plan(apply_overrides(load_recipe("recipes/tiny.py"), settings), "cpu:2").time
    assert time.schedule is not None and time.schedule.name == SEARCHED and time.schedule.num_microbatches == 2
    assert time.flops == pytest.approx(3.02e9 + 0.597e9, rel=0.01)
