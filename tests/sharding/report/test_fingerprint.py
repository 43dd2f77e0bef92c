import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import flax_mesh as fm
from flax_mesh.sharding import check_same_on_all_processes, sharding_fingerprint
from tests.hash_seed import printed_with_another_hash_seed
from tests.multiprocess.processes import assert_all_done, run_workers

P = PartitionSpec
MESH = AbstractMesh((2, 4), ("fsdp", "tp"))
RULES = [("kernel", ("embed", "mlp")), ("bias", ())]


def make():
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


FSDP = P("fsdp")


def of(spec=FSDP, *, path="w", shape=(8, 8), dtype=jnp.float32, mesh=MESH):
    leaf = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    return sharding_fingerprint({path: leaf, "other": leaf})


def test_an_abstract_state_and_its_arrays_have_the_same_fingerprint():
    abstract = fm.abstract_state(make, fm.create_mesh((2, 4), ("fsdp", "tp")), RULES)
    fingerprint = sharding_fingerprint(abstract)
    assert len(fingerprint) == 64 and int(fingerprint, 16)
    assert fingerprint == sharding_fingerprint(fm.init_state(make, abstract))
    assert fingerprint == sharding_fingerprint(fm.abstract_state(make, MESH, RULES))
    check_same_on_all_processes(fingerprint)  # a single process is never an error


def test_the_fingerprint_depends_on_paths_shapes_dtypes_specs_and_mesh_sizes_alone():
    changes = [of(spec) for spec in (P("tp"), P(None, "fsdp"), P(("fsdp", "tp")))]
    changes += [of(path="v"), of(shape=(8, 16)), of(dtype=jnp.bfloat16)]
    changes += [of(mesh=AbstractMesh((4, 2), names)) for names in (("fsdp", "tp"), ("tp", "fsdp"))]
    assert len({of(), *changes}) == 9
    assert of() == of(P("fsdp", None)) == of(P(("fsdp",)))
    assert of() == of(P("fsdp", "sp"), mesh=AbstractMesh((2, 4, 1), ("fsdp", "tp", "sp")))


@pytest.mark.slow
def test_the_fingerprint_does_not_depend_on_the_hash_seed():
    call = "sharding_fingerprint(fm.abstract_state(make, MESH, RULES))"
    code = f"from tests.sharding.report.test_fingerprint import *; print({call})"
    assert printed_with_another_hash_seed(code) == sharding_fingerprint(fm.abstract_state(make, MESH, RULES))


def test_arrays_without_a_sharding_are_listed_in_one_error():
    message = r"a: ndarray \(2,\) has no sharding\nb: ndarray .*\nTake the fingerprint"
    with pytest.raises(fm.ShardingError, match=message):
        sharding_fingerprint({"a": np.ones(2), "b": np.ones(2), "text": "no array"})


@pytest.mark.slow
def test_all_processes_report_which_ones_differ():
    ended = run_workers("fingerprint", 3, 1, module="tests.sharding.process_worker")
    assert_all_done(ended, "fingerprint is done")
    for rank, (_, text) in enumerate(ended):
        assert f"process {rank}: all processes of this run must have the same rules, but there are 2 versions" in text
        assert "on processes 0, 2; " in text and "on process 1. Start all of them" in text
