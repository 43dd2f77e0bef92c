"""Nothing that a step computes, reads or sends is lost between its jaxpr and the kernels of the estimate."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from flax_mesh.plan.forecast import Estimate, estimate
from flax_mesh.plan.program.cost import costs
from flax_mesh.plan.program.kernels import Kernel
from tests.plan.cases import CASES, Case
from tests.plan.compiled import MICROBATCHES, estimates
from tests.plan.conservation import Counted, in_jaxpr, in_kernels

P = PartitionSpec
# Products that several devices repeat, or that are lowered to larger ones: the kernels have more than the jaxpr.
REPEATED = {
    "sp": "keys and values are computed for all of a sequence",
    "moe": "attention is computed by each device of ep, which have the same tokens; and a tile by each of its experts",
}
STEPS = [case for case in CASES if not case.is_pipeline]
# With remat, a stage computes again whatever its backward pass needs.
PIPELINES = [case for case in CASES if case.is_pipeline and "stage_remat" not in case.settings]


def mesh_of(sizes: dict[str, int]) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def counted(case: Case) -> tuple[Counted, Counted, int]:
    mesh = mesh_of(case.sizes)
    step, arguments = case.make(mesh, **case.settings)
    return in_jaxpr(step, arguments), in_kernels(estimate(step, arguments, case.sizes, case.platform)), mesh.size


@pytest.mark.slow
@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.name)
def test_the_kernels_have_all_flops_and_arguments_of_the_jaxpr(case):
    true, found, devices = counted(case)
    assert found.arguments == true.arguments
    flops = {dtype: count * devices for dtype, count in found.flops.items()}
    assert flops.keys() == true.flops.keys()
    if case.name.split()[-1] in REPEATED:
        assert all(flops[dtype] >= count for dtype, count in true.flops.items())
    else:
        assert flops == pytest.approx(true.flops)


@pytest.mark.slow
@pytest.mark.parametrize("case", PIPELINES, ids=lambda case: case.name)
def test_the_stages_of_a_pipeline_have_all_flops_and_no_more(case):
    """F, B and W of all stages and microbatches have the FLOPs of the step without a pipeline."""
    mesh = mesh_of({name: size for name, size in case.sizes.items() if name != "pp"})
    step, arguments = case.make(mesh, **{key: x for key, x in case.settings.items() if key != "schedule"})
    flops = Counter[str]()
    for stage in estimates(case).values():
        flops.update({dtype: count * mesh.size * MICROBATCHES for dtype, count in in_kernels(stage).flops.items()})
    assert flops == pytest.approx(in_jaxpr(step, arguments).flops)


def _program() -> tuple[Any, tuple[Any, ...]]:
    """Products of three dtypes, their sums, grouped products with gradients, a loop and collectives, on two devices."""
    mesh = mesh_of({"fsdp": 2})

    def array(*shape: int, axis: str | None = None, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(axis)))

    def each(x, a, b, wide, split, narrow, experts, sizes):
        y = x @ a + x @ b
        y, _ = jax.lax.scan(lambda y, _: (y @ a, None), y, None, length=3)
        y = y @ jax.lax.all_gather(split, "fsdp", axis=0, tiled=True)
        grouped, backward = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, experts)
        narrow = jax.lax.dot(narrow, narrow, preferred_element_type=jnp.int32)
        return y, wide @ wide, narrow, grouped, *backward(grouped)

    specs, out = (P("fsdp"), P(), P(), P(), P("fsdp"), P(), P(), P()), P("fsdp")
    step = jax.shard_map(each, mesh=mesh, in_specs=specs, out_specs=(out, P(), P(), out, out, P()), check_vma=False)
    x, a, split = array(64, 32, axis="fsdp"), array(32, 32), array(32, 32, axis="fsdp")
    wide, narrow, sizes = array(16, 16, dtype=jnp.float32), array(16, 16, dtype=jnp.int8), array(4, dtype=jnp.int32)
    return jax.jit(step), (x, a, a, wide, split, narrow, array(4, 32, 8), sizes)


def _estimated() -> tuple[Counted, Estimate]:
    step, arguments = _program()
    return in_jaxpr(step, arguments), estimate(step, arguments, {"fsdp": 2}, "tpu")


def _of_devices(found: Counted, count: int) -> Counted:
    """The figures of so many devices, each of which has the same."""
    flops, sent = ({key: value * count for key, value in x.items()} for x in (found.flops, found.collectives))
    return Counted(flops, found.arguments, found.operands * count, sent)


def test_products_operands_and_collectives_of_a_program_are_all_counted():
    true, one = _estimated()
    assert _of_devices(in_kernels(one), 2) == true


def _without(one: Estimate, is_lost: Callable[[Kernel], bool]) -> Estimate:
    kept = tuple(kernel for kernel in one.kernels if not is_lost(kernel))
    return replace(one, kernels=kept, costs=tuple(costs(kept, one.program)))


def _computes(kernel: Kernel, kind: str) -> bool:
    return any(operation.kind == kind for operation in kernel.computes)


def _lose_read(one: Estimate, name: str) -> Estimate:
    """The first read of a product that is an argument, of every kernel; or the first that is not."""
    arguments = set(map(id, one.program.block.arguments))
    for kernel in one.kernels:
        reads = [key for key, x in kernel.reads.items() if (id(x.buffer.array) in arguments) == (name == "argument")]
        if _computes(kernel, "dot_general") and reads:
            del kernel.reads[reads[0]]
            if name != "argument":
                break
    return one


def _lose_trips(one: Estimate) -> Estimate:
    for kernel in one.kernels:
        for operation in kernel.computes:
            operation.times = 1
    return _without(one, lambda kernel: False)


LOSSES: dict[str, Callable[[Estimate], Estimate]] = {
    "product": lambda one: _without(one, lambda kernel: _computes(kernel, "dot_general")),
    "dtype": lambda one: replace(one, costs=tuple(cost._replace(dtype="bfloat16") for cost in one.costs)),
    "parameter": lambda one: _lose_read(one, "argument"),
    "trips": _lose_trips,
    "operand": lambda one: _lose_read(one, "value"),
    "collective": lambda one: _without(one, lambda kernel: _computes(kernel, "all_gather")),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_planted_loss_is_found(loss):
    true, one = _estimated()
    assert _of_devices(in_kernels(LOSSES[loss](one)), 2) != true
