"""Every model, and every group of a pipeline, initialized by kinds of arrays with the bits of one program."""

import functools

import pytest

import flax_mesh as fm
from flax_mesh.mpmd import Pipeline, split_stages
from flax_mesh.mpmd.schedules import make_schedule
from flax_mesh.step.options import StateLayout
from tests.mpmd.zoo.base import OPTIMIZER, Case, groups
from tests.mpmd.zoo.models import BY_NAME, CASES
from tests.sharding.initialize.models import Ways, differences, trained

PIPELINED = ("changed_stack", "decoder_experts_scanned", "tied_embedding", "teacher")


@pytest.fixture
def ways(monkeypatch):
    return Ways(monkeypatch)


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES, ids=BY_NAME)
def test_every_model_has_the_bits_of_one_program(ways, case: Case):
    make = functools.partial(trained, case.make)
    abstract = fm.abstract_state(make, fm.create_mesh((8,), ("fsdp",)), "fsdp", on_mismatch="drop")
    initialize = functools.partial(fm.init_state, make, abstract)
    assert differences(ways.whole(initialize), ways.by_kind(initialize)) == []


@pytest.mark.sampled
@pytest.mark.parametrize("name", PIPELINED)
def test_every_group_of_a_pipeline_has_the_bits_of_one_program(ways, name: str):
    case = BY_NAME[name]
    mesh, schedule = groups(pp=2, fsdp=2), make_schedule("1f1b", num_groups=2, num_microbatches=2)
    kinds = {"layers": case.layers, "wrt": case.wrt, "mesh": mesh, "schedule": schedule}
    staged = split_stages(case.loss_fn, case.make, case.batch(4), **kinds)
    pipeline = Pipeline(staged, OPTIMIZER, layout=StateLayout(rules="fsdp"))
    whole, by_kind = ways.whole(pipeline.init_state), ways.by_kind(pipeline.init_state)
    assert differences(whole.to_nnx(), by_kind.to_nnx()) == []
