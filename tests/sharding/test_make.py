"""Valid results and contents of `make()`: arrays without a Variable, metadata, a mesh in context, several modules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import flax_mesh as fm
from flax_mesh.sharding import sharding_fingerprint

P = PartitionSpec
AXES = ("fsdp", "tp")
pytestmark = pytest.mark.filterwarnings("ignore:rules=.fsdp.")  # tp has no work here


@pytest.fixture(scope="module")
def mesh():
    return fm.create_mesh((2, 4), AXES)


class Attributes(nnx.Module):
    """Arrays without a Variable: as attributes, in lists and dicts, and the scales of nnx.WeightNorm."""

    def __init__(self, rngs, **metadata):
        self.linear = nnx.Linear(8, 8, rngs=rngs, **metadata)
        self.normed = nnx.WeightNorm(nnx.Linear(8, 8, rngs=rngs), rngs=rngs)
        self.freqs, self.on_host = jnp.linspace(0.0, 1.0, 8), np.arange(8.0, dtype=np.float32)
        self.key = rngs.params()
        self.tables = nnx.data([jnp.ones(8), {"more": jnp.full(8, 2.0)}])
        self.listed = nnx.List([jnp.arange(8.0)])

    def __call__(self, x):
        shifted = x + self.freqs + self.on_host + self.tables[0] + self.tables[1]["more"] + self.listed[0]
        return self.normed(self.linear(shifted + jax.random.normal(self.key, x.shape)))


class Empty(nnx.Module):
    def __init__(self, **metadata):
        self.kernel, self.bias = nnx.Param(jnp.ones((8, 8))), nnx.Param(jnp.ones(8))
        self.rows, self.columns = nnx.Param(jnp.ones((0, 8)), **metadata), nnx.BatchStat(jnp.ones((8, 0)), **metadata)


def make():
    return Attributes(nnx.Rngs(0))


def make_both():
    model = make()
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def paths(tree):
    return [path for path, _ in fm.named_leaves(tree)]


def test_arrays_without_a_variable_are_part_of_the_state(mesh):
    abstract, plain = fm.abstract_state(make, mesh, "fsdp"), make()
    assert paths(abstract) == paths(nnx.state(plain)) and {"freqs", "tables/1/more", "listed/0"} < set(paths(abstract))
    assert dict(fm.named_leaves(abstract))["freqs"].sharding == NamedSharding(mesh, P("fsdp"))
    model = fm.init_model(make, abstract)
    np.testing.assert_allclose(model(jnp.ones((2, 8))), plain(jnp.ones((2, 8))), rtol=1e-5)
    assert model.freqs.sharding == NamedSharding(mesh, P("fsdp"))
    assert paths(fm.abstract_state(make_both, mesh, "fsdp")["model"]) == paths(abstract)
    explanation = fm.explain_sharding(make_both, mesh, "fsdp")
    assert explanation.fingerprint == sharding_fingerprint(fm.abstract_state(make_both, mesh, "fsdp"))


def test_plain_arrays_need_a_rule_unless_the_variables_are_annotated(mesh):
    with pytest.raises(fm.ShardingError, match=r"Partition rule not found for param: freqs \(8,\)"):
        fm.abstract_state(make, mesh, [("kernel|bias|scales|on_host|tables|listed", ())])
    annotated = lambda: Attributes(nnx.Rngs(0), kernel_metadata={"out_sharding": AXES})  # noqa: E731
    found = {path: x.sharding.spec for path, x in fm.named_leaves(fm.abstract_state(annotated, mesh))}
    assert found["linear/kernel"] == P(*AXES) and found["freqs"] == P()


def test_metadata_equals_a_plain_call_of_make(mesh):
    annotated = lambda: nnx.Linear(8, 8, kernel_metadata={"out_sharding": AXES}, rngs=nnx.Rngs(0))  # noqa: E731
    with jax.set_mesh(mesh):
        plain = nnx.state(annotated())
    abstract = fm.abstract_state(annotated, mesh)
    for state in (abstract, fm.init_state(annotated, abstract), nnx.state(fm.init_model(annotated, abstract))):
        jax.tree.map(lambda a, b: None, plain, state)  # raises an error if metadata differ
    with nnx.use_eager_sharding(False):
        jax.tree.map(lambda a, b: None, nnx.state(annotated()), fm.abstract_state(annotated, mesh))


def test_random_streams_in_metadata_are_left_out(mesh):
    make = lambda: nnx.Dict(x=nnx.Param(jnp.ones(8), rngs=nnx.Rngs(0), kind="a"))  # noqa: E731
    first, second = (fm.abstract_state(make, mesh, "fsdp") for _ in range(2))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    metadata = fm.init_model(make, first).x.get_metadata()
    assert "rngs" not in metadata and metadata["kind"] == "a"


def test_arrays_in_metadata_are_refused(mesh):
    masked = lambda: nnx.List([nnx.Param(jnp.ones(8), mask=jnp.ones(8)) for _ in range(3)])  # noqa: E731
    with pytest.raises(fm.ShardingError, match=r"^{0..2}: its metadata 'mask' contains an array\nMetadata is static"):
        fm.abstract_state(masked, mesh, "fsdp")


def test_the_mesh_is_in_context_while_make_is_traced(mesh):
    seen = []

    def constrained():
        seen.append(fm.current_mesh())
        x = jax.lax.with_sharding_constraint(jnp.ones((8, 8)), P("fsdp", "tp"))
        return nnx.Dict(x=nnx.Param(x, out_sharding=P(None, None), eager_sharding=True))

    for given in (mesh, AbstractMesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)):
        abstract = fm.abstract_state(constrained, given, "fsdp")
    model = fm.init_model(constrained, fm.abstract_state(constrained, mesh, "fsdp"))
    fm.explain_sharding(constrained, mesh, "fsdp")
    assert model.x[...].sharding == NamedSharding(mesh, P(None, "fsdp")) and paths(abstract) == ["x"]
    assert len(seen) >= 5 and all(found.axis_names == AXES for found in seen)


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"generator": Empty(), "critic": nnx.Dict(kernel=nnx.Param(jnp.ones((8, 1))))},
        lambda: [Empty(), Empty()],
        lambda: (Empty(), Empty()),
        lambda: {"model": Empty(), "other": {"array": jnp.ones(8)}},
        lambda: {"a": jnp.ones((8, 8)), "b": [jnp.ones(8)]},
    ],
)
def test_make_may_return_several_modules_or_arrays(make, mesh):
    abstract = fm.abstract_state(make, mesh, "fsdp")
    made, plain = fm.init_model(make, abstract), make()
    assert type(made) is type(plain) and paths(abstract) == paths(nnx.state(plain))
    assert [x.sharding for x in jax.tree.leaves(nnx.state(made))] == [x.sharding for x in jax.tree.leaves(abstract)]
    fm.explain_sharding(make, mesh, "fsdp")
    with pytest.raises(fm.ShardingError, match=r"(dict|list|tuple) has neither a rule table nor annotations"):
        fm.abstract_state(make, mesh)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: None, r"make\(\) must return an nnx.Module, .* got None"),
        (lambda: jnp.ones(8), r"make\(\) must return an nnx.Module, .* got an array"),
        (lambda: "model", r"make\(\) must return an nnx.Module, .* got an object of type str"),
        (nnx.Dropout(0.5), "make must be a function .*, got an object of type Dropout"),
        ({"a": np.ones(8)}, "make must be a function, got {'a': array"),
    ],
)
def test_a_wrong_make_is_a_one_line_error(make, message, mesh):
    for call in (fm.abstract_state, fm.explain_sharding):
        with pytest.raises(TypeError, match=message):
            call(make, mesh, "fsdp")


def test_a_state_without_shardings_is_no_layout(mesh):
    make = lambda: nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(3)])  # noqa: E731
    with pytest.raises(fm.ShardingError, match=r"{0..2}/kernel: no sharding on a mesh; make the abstract state with"):
        fm.init_model(make, nnx.state(make()))


@pytest.mark.parametrize(
    ("rules", "over"),
    [
        ("fsdp", "tp"),
        ("fsdp+tp", ()),
        ([(".*", ("embed", "mlp"))], ()),
        ([("bias", ()), (".*", P(AXES))], "tp"),
        (None, ()),
    ],
)
def test_arrays_of_size_0_have_every_layout(rules, over, mesh):
    def make():
        model = Empty(**({} if rules else {"out_sharding": AXES}))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    abstract = fm.abstract_state(make, mesh, rules, on_mismatch="drop", shard_optimizer_over=over)
    state = fm.init_state(make, abstract)
    whole = fm.gather(state)
    for again in (fm.shard(whole, abstract), fm.shard(fm.gather(state, bytes_in_flight=64), abstract)):
        assert [x.sharding for x in jax.tree.leaves(again)] == [x.sharding for x in jax.tree.leaves(abstract)]
    assert whole["model"]["rows"].get_value().shape == (0, 8)
    assert fm.explain_sharding(make, mesh, rules, shard_optimizer_over=over).report.total_parameters == 72


def test_a_function_that_returns_an_existing_model_leaves_it_unchanged():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    before = model.kernel.get_metadata()
    abstract = fm.abstract_state(lambda: model, fm.create_mesh((8,), ("fsdp",)), rules="fsdp")
    assert abstract["kernel"].sharding.spec == P(None, "fsdp")
    assert model.kernel.get_metadata() == before
    assert isinstance(model.kernel[...], jax.Array)
