"""Batches of a user's training loop: split over the devices, copied, and refused where they cannot be split."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from flax_mesh import PartitionAxis, abstract_state, create_mesh
from flax_mesh.data.user_batches import UserBatches
from flax_mesh.errors import ConfigError
from flax_mesh.mpmd import MpmdMesh, Pipeline, split_stages
from flax_mesh.train import array_batches, make_eval_step, make_train_step, place_batch
from tests.step.batches import Case, check, random_case
from tests.step.net import batch, layout, make, start

pytestmark = [
    pytest.mark.usefixtures("quick_unless_slow"),
    pytest.mark.filterwarnings("ignore:the stages have"),  # mean_loss has products outside of the layers
]
ALL = ("features", "images", "pair", "mask", "scale", "keys")


@pytest.mark.parametrize(
    "case",
    [
        Case("dp:8", leaves=ALL),
        Case("dp:2,fsdp:2,tp:2", num_microbatches=4, leaves=("features", "scale"), source="jax"),
        pytest.param(Case("dp:4,tp:2", leaves=("mask",), evaluates=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_device_computes_and_receives_its_share_of_a_batch(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_a_device_computes_and_receives_its_share_of_a_random_batch(seed):
    check(random_case(seed))


def test_bytes_that_place_batch_transfers_to_a_device():
    keys, given = jax.random.split(jax.random.key(0), 16), {"x": np.ones((16, 8, 3)), "n": np.float32(2)}
    placed = place_batch({**given, "keys": keys}, create_mesh((2, 2, 2), ("dp", "fsdp", "tp")))
    assert [shard.data.nbytes for shard in placed["x"].addressable_shards] == [16 * 8 * 3 * 4 // 4] * 8
    assert {shard.data.shape for shard in placed["keys"].addressable_shards} == {(4,)}
    assert placed["n"].sharding.is_fully_replicated


# --- arrays that are filled again ---


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Zeros whose memory JAX uses without a copy on CPUs: it begins at a multiple of 64 bytes."""
    memory = np.zeros(4 * int(np.prod(shape)) + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + 4 * int(np.prod(shape))].view(np.float32).reshape(shape)


def mean_loss(model: Any, batch: Any):
    """The mean of x * scale, after products that take longer than it takes the caller to fill the array again."""
    slow = jnp.full((512, 512), 1e-3)
    for _ in range(4):
        slow = slow @ slow
    x = batch["x"] * (1 + 0 * slow[0, 0])
    return (x * batch["scale"]).sum() + 0 * model(x).sum(), x.size


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    """On two groups of one device."""
    mesh = MpmdMesh(create_mesh((2,), ("pp",), devices=jax.devices()[:2]), "pp")
    make_model = lambda: make()()[0]  # noqa: E731
    shapes = {"x": np.zeros((256, 8), np.float32), "scale": np.float32(1)}
    staged = split_stages(mean_loss, make_model, shapes, mesh=mesh, schedule="1f1b", num_microbatches=2)
    return Pipeline(staged, optax.sgd(0.0))


def test_the_memory_of_a_batch_belongs_to_its_caller(pipeline):
    mesh = create_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    state, array = start(make(optax.sgd(0.0)), mesh), aligned((256, 8))
    plain = make_train_step(mean_loss, state, num_microbatches=2)
    for step, state in ((plain, state), (pipeline.step, pipeline.init_state())):  # noqa: B020
        for number in range(3):
            array[:] = number
            with jax.transfer_guard("allow" if step == pipeline.step else "disallow"):
                state, metrics = step(state, {"x": array, "scale": np.full((), 3, np.float32)})
            array[:] = -1
            assert metrics["loss"] == 3 * number  # a scalar belongs to every microbatch
    array[:] = 5
    placed = place_batch({"x": array}, mesh)
    array[:] = -1
    assert (placed["x"] == 5).all()


def test_a_state_that_was_donated_is_refused_by_step_evaluation_and_pipeline(pipeline):
    state = start(make())
    given, old = {"x": np.ones((256, 8), np.float32), "scale": np.float32(1)}, pipeline.init_state()
    make_train_step(mean_loss, state)(state, given)
    pipeline.step(old, given)
    for call in (
        lambda: make_train_step(mean_loss, state)(state, given),
        lambda: make_eval_step(mean_loss, state)(state, given),
        lambda: pipeline.step(old, given),
        lambda: pipeline.evaluate(old, given),
    ):
        with pytest.raises(ValueError, match=r"^the arrays of this state are deleted, because it was the argument of"):
            call()


# --- batches that are refused ---


def test_arrays_that_jax_does_not_have_are_refused_by_path_and_with_the_repair(pipeline):
    wrong = {
        "mask": (
            np.ma.masked_array(np.ones(256), False),
            "is a masked array, whose mask JAX drops; pass x.filled(value)",
        ),
        "big": (
            np.ones(256, ">f4"),
            "is an array of >f4, another byte order; pass x.astype(x.dtype.newbyteorder('='))",
        ),
        "any": (np.array([1] * 256, object), "is an array of object; it must be an array of numbers"),
    }
    given = {name: array for name, (array, _) in wrong.items()}
    mesh = create_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    state = layout(make(), mesh)
    calls = {
        "make_train_step": lambda: make_train_step(mean_loss, state)(state, given),
        "make_eval_step": lambda: make_eval_step(mean_loss, state)(state, given),
        "Pipeline.step": lambda: pipeline.step(pipeline.abstract, given),
        "Pipeline.evaluate": lambda: pipeline.evaluate(pipeline.abstract, given),
        "split_stages": lambda: split_stages(mean_loss, make()()[0], given, num_stages=2),
        "place_batch": lambda: place_batch(given, mesh),
        "array_batches": lambda: array_batches(given, batch_size=2, seed=0),
        "make_batches": lambda: UserBatches(lambda: lambda step: given, 256),
        "iterator": lambda: UserBatches(lambda: iter([given]), 256, resumable=False),
    }
    for call in calls.values():
        with pytest.raises(ConfigError) as error:
            call()
        for name, (_, text) in wrong.items():
            assert any(f"'{name}' {text}" in line for line in error.value.lines), error.value.lines


WRONG = {
    "rows": (
        batch(12),
        r"^the batch of 12 rows is not divisible by 8 \(fsdp=4 \* num_microbatches=2\); use a multiple",
    ),
    "lengths": ({**batch(16), "weights": np.ones(5)}, r"numbers of rows, \[5, 16\]; .* 5 in 'weights'; 16 in 'w', 'x'"),
    "int32": ({**batch(16), "id": np.full(16, 2**40)}, "batch: 'id' is int64 and must fit int32, got .* 1099511627776"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_batch_that_cannot_be_split_is_refused(name):
    wrong, message = WRONG[name]
    mesh = create_mesh((4,), ("fsdp",), devices=jax.devices()[:4])
    state = layout(make(), mesh)
    loss_fn = lambda model, b: (model(b["x"]).sum(), len(b["x"]))  # noqa: E731
    for call in (
        lambda: make_train_step(loss_fn, state, num_microbatches=2)(state, wrong),
        lambda: make_eval_step(loss_fn, state)(state, wrong if name != "rows" else batch(10)),
        lambda: place_batch(wrong if name != "rows" else batch(10), mesh),
    ):
        with pytest.raises(ConfigError) as found:
            call()
        assert name != "rows" or "not divisible by" in str(found.value)
    with pytest.raises(ConfigError, match=message):
        make_train_step(loss_fn, state, num_microbatches=2)(state, wrong)


def test_axes_of_the_mesh_that_nothing_uses_are_named():
    create = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))  # noqa: E731
    with pytest.warns(UserWarning, match=r"^rules='fsdp': ep=2, tp=2 of the mesh has no work"):
        abstract_state(create, create_mesh((2, 2, 2), ("fsdp", "ep", "tp")), rules="fsdp")
    mesh = create_mesh((8,), ("data",))
    state = start(make(), mesh)
    loss_fn = lambda model, b: (model(b["x"]).sum(), len(b["x"]))  # noqa: E731
    with pytest.warns(UserWarning, match=r"no axis of the mesh \{'data': 8\} has a meaning in `axes`; pass axes="):
        make_eval_step(loss_fn, state)(state, batch())
    axes = PartitionAxis(batch_axis="data")
    step = make_train_step(loss_fn, state, axes=axes)
    assert step.lower(state, batch()).compile().input_shardings[0][1]["x"].spec == P("data")
