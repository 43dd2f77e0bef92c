import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import flax_mesh as fm
from flax_mesh.sharding import sharding_fingerprint
from flax_mesh.sharding.abstract import made_leaves

P = PartitionSpec
RULES = [("kernel$", ("embed", "mlp")), (".*", ())]


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)])
        self.out = nnx.Linear(16, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def make():
    return MLP(nnx.Rngs(0))


def make_both():
    model = make()
    return model, nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), wrt=nnx.Param)


def meshes():
    return {
        "one": fm.create_mesh((1, 1, 1, 1, 1), devices=jax.devices()[:1]),
        "fsdp8": fm.create_mesh(),
        "dp2fsdp2tp2": fm.create_mesh((2, 2, 1, 2, 1)),
        "tp8": fm.create_mesh((1, 1, 1, 8, 1)),
        "explicit fsdp8": fm.create_mesh(axis_types="explicit"),
        "mixed dp2fsdp2tp2": fm.create_mesh((2, 2, 1, 2, 1), axis_types=("auto", *["explicit"] * 4)),
    }


def digest(state) -> str:
    data = [np.asarray(x if x.dtype != jax.random.key(0).dtype else jax.random.key_data(x)) for x in state]
    return hashlib.sha256(b"".join(x.tobytes() for x in data)).hexdigest()


def test_the_abstract_state_allocates_nothing_and_needs_no_devices():
    mesh = AbstractMesh((512, 8), ("fsdp", "tp"))
    big = lambda: nnx.Linear(2**17, 2**20, rngs=nnx.Rngs(0))  # noqa: E731  (half a terabyte)
    abstract = fm.abstract_state(big, mesh, RULES)
    kernel = dict(fm.named_leaves(abstract))["kernel"]
    assert isinstance(kernel, jax.ShapeDtypeStruct)
    assert kernel.sharding.spec == P("fsdp", "tp")
    assert kernel.sharding.shard_shape(kernel.shape) == (256, 131072)
    with pytest.raises(fm.ShardingError, match="made for an AbstractMesh"):
        fm.init_state(big, abstract)


@pytest.mark.parametrize("rules", [list, fm.PartitionRules])
def test_rules_without_layers_use_the_layers_of_the_model(rules):
    @fm.partitioned([("kernel", ("mlp", "embed"))], layers="blocks")
    class Scanned(nnx.Module):
        def __init__(self):
            keys = jax.random.split(jax.random.key(0), 4)
            self.blocks = nnx.vmap(lambda key: nnx.Linear(8, 16, use_bias=False, rngs=nnx.Rngs(key)))(keys)

    mesh, table = meshes()["dp2fsdp2tp2"], [("kernel", ("embed", "mlp"))]
    make = lambda: (Scanned(), nnx.Optimizer(Scanned(), optax.adam(1e-3), wrt=nnx.Param))  # noqa: E731
    state = fm.abstract_state(make, mesh, rules(table))
    specs = {path: leaf.sharding.spec for path, leaf in fm.named_leaves(state)}
    assert specs["model/blocks/kernel"] == specs["optimizer/opt_state/0/mu/blocks/kernel"] == P(None, "fsdp", "tp")
    assert fm.explain_sharding(make, mesh, rules(table)).fingerprint == sharding_fingerprint(state)
    other = fm.PartitionRules(table, layers="others")  # layers of the argument override the model's layers
    assert spec_of(fm.abstract_state(Scanned, mesh, other), "blocks/kernel") == P("fsdp", "tp")


@pytest.mark.slow
def test_the_state_is_initialized_sharded_with_the_same_bits_on_every_mesh():
    reference = None
    for mesh in meshes().values():
        abstract = fm.abstract_state(make_both, mesh, RULES)
        state = fm.init_state(make_both, abstract)
        for expected, have in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
            assert have.sharding == expected.sharding and have.shape == expected.shape and have.dtype == expected.dtype
        leaves = jax.tree.leaves(fm.gather(state))
        reference = reference or digest(leaves)
        assert digest(leaves) == reference


KINDS = ("normal", "uniform")
INITIALIZERS = [f"{name}_{kind}" for name in ("lecun", "glorot", "he") for kind in KINDS]
SAMPLERS = ("bits", "cauchy", "exponential", "gumbel", "laplace", "logistic", "maxwell")
DISTRIBUTIONS = {
    **{name: getattr(nnx.initializers, name)() for name in (*KINDS, "truncated_normal", "orthogonal", *INITIALIZERS)},
    "delta_orthogonal": lambda key, shape: nnx.initializers.delta_orthogonal()(key, (3, shape[1], shape[0]))[1],
    **{name: getattr(jax.random, name) for name in SAMPLERS},
    "derived": lambda key, shape: jnp.tanh(jnp.exp(-jax.random.normal(key, shape))),
    "double_sided_maxwell": lambda key, shape: jax.random.double_sided_maxwell(key, 0.1, 1.0, shape),
    "lognormal": lambda key, shape: jax.random.lognormal(key, shape=shape),
    "pareto": lambda key, shape: jax.random.pareto(key, 2.0, shape),
    "rayleigh": lambda key, shape: jax.random.rayleigh(key, 2.0, shape),
    "t": lambda key, shape: jax.random.t(key, 3.0, shape),
    "triangular": lambda key, shape: jax.random.triangular(key, 0.0, 0.3, 1.0, shape),
    "wald": lambda key, shape: jax.random.wald(key, 2.0, shape),
    "weibull_min": lambda key, shape: jax.random.weibull_min(key, 1.0, 2.0, shape),
    "gamma": lambda key, shape: jax.random.gamma(key, 1.5, shape),
    # Sums over rows that are split between devices: every mesh adds other partial sums.
    "normalized": lambda key, shape: (lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True))(
        jax.random.normal(key, shape)
    ),
}


class Drawn(nnx.Module):
    """Arrays whose shards have few elements in their last dim, fewer than a vector of the CPU."""

    def __init__(self):
        self.drawn = nnx.List([nnx.Param(draw(jax.random.key(0), (64, 24))) for draw in DISTRIBUTIONS.values()])


LAYOUTS = [((1,), ()), ((8,), ("x", None)), ((8,), (None, "x")), ((2, 4), ("x", "y")), ((2, 4), ("y", "x"))]
LAYOUTS += [((4, 2), (None, ("x", "y")))]


@pytest.mark.slow
def test_initial_values_differ_between_meshes_only_in_sums_over_a_split_dim():
    found: dict[str, set[str]] = {name: set() for name in DISTRIBUTIONS}
    for shape, spec in LAYOUTS:
        devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
        mesh = jax.sharding.Mesh(devices, ("x", "y")[: len(shape)])
        abstract = fm.abstract_state(Drawn, mesh, [(".*", P(*spec))])
        assert all(x.sharding.spec == P(*spec) for x in jax.tree.leaves(abstract))
        for name, leaf in zip(DISTRIBUTIONS, jax.tree.leaves(fm.init_state(Drawn, abstract)), strict=True):
            found[name].add(digest([leaf]))
    assert [name for name, digests in found.items() if len(digests) > 1] == ["normalized"]


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_initialization_never_allocates_a_full_copy_on_one_device(axis_types):
    class Wide(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(1024, 1024, rngs=rngs) for _ in range(4)])

    mesh = fm.create_mesh(axis_types=axis_types)
    abstract = fm.abstract_state(lambda: Wide(nnx.Rngs(0)), mesh, RULES)
    shardings = [x.sharding for x in jax.tree.leaves(abstract)]
    init = jax.jit(lambda: made_leaves(lambda: Wide(nnx.Rngs(0)), mesh), out_shardings=shardings)
    memory = init.lower().compile().memory_analysis()
    assert memory is not None
    full = sum(x.size * 4 for x in jax.tree.leaves(abstract))
    assert memory.output_size_in_bytes < full / 7
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < full / 2


def test_init_state_refuses_the_abstract_state_of_another_make():
    abstract = fm.abstract_state(make, meshes()["fsdp8"], RULES)
    with pytest.raises(fm.ShardingError, match="make\\(\\) and the abstract state must have the same arrays") as error:
        fm.init_state(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), abstract)
    assert "out/kernel: only in the abstract state" in str(error.value)
    assert "kernel: only in the state of make()" in str(error.value)
    other = lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0))  # noqa: E731
    with pytest.raises(fm.ShardingError, match=r"kernel: abstract f32\[8,8\], make"):
        fm.init_state(other, fm.abstract_state(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), meshes()["fsdp8"], RULES))


def annotated(*names, features=8, **kinds):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    return lambda: nnx.Linear(8, features, kernel_init=init, rngs=nnx.Rngs(0), **kinds)


def spec_of(state, path):
    return dict(fm.named_leaves(state))[path].sharding.spec


def test_flax_annotations_replace_rules():
    mesh = meshes()["dp2fsdp2tp2"]
    state = fm.init_state(annotated("embed", "tp"), fm.abstract_state(annotated("embed", "tp"), mesh))
    assert spec_of(state, "kernel") == P("fsdp", "tp")  # a logical axis and a mesh axis
    assert spec_of(state, "bias") == P()
    axes = fm.PartitionAxis(extra={"rows": ("dp", "fsdp")})
    assert spec_of(fm.abstract_state(annotated("rows", None), mesh, axes=axes), "kernel") == P(("dp", "fsdp"), None)


def test_unknown_names_in_annotations_are_reported():
    mesh = meshes()["dp2fsdp2tp2"]
    message = r"kernel: its annotation \('nowhere', 'tp'\) names 'nowhere', neither a mesh"
    with pytest.raises(fm.ShardingError, match=message):
        fm.abstract_state(annotated("nowhere", "tp"), mesh)
    with pytest.raises(fm.ShardingError, match="dim 1 has size 9, not divisible by 2"):
        fm.abstract_state(annotated("embed", "tp", features=9), mesh)
    abstract = fm.abstract_state(annotated("nowhere", "tp"), mesh, RULES)  # a table overrides the annotations
    assert spec_of(fm.init_state(annotated("nowhere", "tp"), abstract), "kernel") == P("fsdp", "tp")


def test_a_stack_whose_annotation_lacks_the_layer_dim_is_reported():
    def stacked(**kinds):
        return lambda: nnx.Dict(layers=nnx.vmap(lambda key: annotated("embed", "tp")(), **kinds)(jnp.arange(3)))

    mesh, named = meshes()["dp2fsdp2tp2"], {"transform_metadata": {nnx.PARTITION_NAME: None}}
    message = r"layers/kernel: its annotation .* has 2 names, but the array \(3, 8, 8\)"
    with pytest.raises(fm.ShardingError, match=message):
        fm.abstract_state(stacked(), mesh)
    assert spec_of(fm.abstract_state(stacked(**named), mesh), "layers/kernel") == P(None, "fsdp", "tp")


def test_a_class_may_define_its_rules_and_axes():
    @fm.partitioned(rules=[("kernel", ("embed", "mlp")), (".*", ())], layers="layers")
    class Own(nnx.Module):
        def __init__(self, axes):
            self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.axes = axes

    mesh = fm.create_mesh((4, 2), ("x", "y"))
    axes = fm.PartitionAxis(fully_sharded_data_parallel_axis="x", tensor_parallel_axis="y")
    abstract = fm.abstract_state(lambda: Own(axes), mesh)
    assert dict(fm.named_leaves(abstract))["linear/kernel"].sharding.spec == P("x", "y")
    assert fm.partition_rules(Own(axes)).layers == ("layers",)
    message = r'Linear has neither a rule table nor annotations. Pass rules="fsdp" .*@partitioned'
    with pytest.raises(fm.ShardingError, match=message):
        fm.abstract_state(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh)


# --- annotations as other projects write them: with Flax's rules, and as shardings ---

FOREIGN = fm.create_mesh((2, 2, 2), ("data", "fsdp", "tensor"))


def kernel_spec(annotation, **metadata):
    metadata = {"out_sharding": annotation} | metadata
    make = lambda: nnx.Linear(8, 8, kernel_metadata=metadata, rngs=nnx.Rngs(0))  # noqa: E731
    return dict(fm.named_leaves(fm.abstract_state(make, FOREIGN)))["kernel"].sharding.spec


def test_the_rules_of_a_variable_map_its_names():
    rules = (("rows", None), ("columns", ("data", "tensor")))
    assert kernel_spec(("rows", "columns"), sharding_rules=rules) == P(None, ("data", "tensor"))
    assert kernel_spec(("embed", "columns"), sharding_rules=rules) == P("fsdp", ("data", "tensor"))


def test_the_rules_in_context_map_names_and_precede_the_logical_axes_of_flax_mesh():
    with nnx.logical_axis_rules((("embed", ("data", "fsdp")), ("rows", "tensor"))):
        assert kernel_spec(("embed", "rows")) == P(("data", "fsdp"), "tensor")
        assert kernel_spec(("embed", "rows"), sharding_rules=(("rows", None),)) == P(("data", "fsdp"), None)
    with pytest.raises(fm.ShardingError, match="names 'rows', neither a mesh axis nor a logical axis"):
        kernel_spec(("embed", "rows"))


def test_an_annotation_may_be_a_spec_a_sharding_or_a_format():
    spec = P("fsdp", "tensor")
    sharding = NamedSharding(FOREIGN, spec)
    for annotation in (spec, sharding, Format(Layout((0, 1)), sharding)):
        assert kernel_spec(annotation) == spec
    make = lambda: nnx.Linear(8, 8, kernel_metadata={"out_sharding": sharding}, rngs=nnx.Rngs(0))  # noqa: E731
    assert "fsdp, tensor" in fm.explain_sharding(make, FOREIGN).to_text()


def test_two_names_with_the_same_axis_are_an_error():
    error = pytest.raises(fm.ShardingError, match=r"kernel: dim 1 .*uses mesh axis 'fsdp' that an earlier dim uses")
    with nnx.logical_axis_rules((("a", "fsdp"), ("b", "fsdp"))), error:
        kernel_spec(("a", "b"))
