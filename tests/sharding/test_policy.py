"""`on_mismatch` and `dropped` have the same meaning in every function that takes them."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import flax_mesh as fm

P = PartitionSpec
SHAPES = {"odd": (8, 6), "unknown": (8, 8), "twice": (8, 8), "long": (8, 8), "fits": (8, 8)}
SPECS = {"odd": P("a", "b"), "unknown": P("a", "c"), "twice": P("b", "b"), "long": P("a", "b", None)}
SPECS |= {"fits": P("b", "a")}
LEFT = {"odd": ("a",), "unknown": ("a",), "twice": ("b",), "long": ("a", "b"), "fits": ("b", "a")}
MESH = fm.create_mesh((2, 4), ("a", "b"))
TREE = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
PLACED = jax.device_put(TREE, jax.sharding.NamedSharding(MESH, P()))
RULES = list(SPECS.items())


def specs_of(arrays):
    return jax.tree.map(lambda x: x.sharding.spec, arrays)


def constraints(on_mismatch, dropped):
    with jax.set_mesh(MESH):
        policy = {"on_mismatch": on_mismatch, "dropped": dropped}
        return specs_of({name: fm.with_sharding_constraint(TREE[name], SPECS[name], **policy) for name in SPECS})


def optimizer(**policy):
    def make():
        model = nnx.Dict({name: nnx.Param(jnp.ones(shape)) for name, shape in SHAPES.items()})
        return model, nnx.Optimizer(model, optax.sgd(1e-3, momentum=0.9), wrt=nnx.Param)

    state = fm.abstract_state(make, MESH, RULES, **policy)
    model, momenta = specs_of(nnx.to_pure_dict(state["model"])), specs_of(nnx.to_pure_dict(state["optimizer"]))
    assert momenta["opt_state"][0]["trace"] == model
    return model


def callables(**policy):
    return specs_of(jax.tree.map(lambda fn, x: fn(x), fm.make_shard_and_gather_fns(SPECS, MESH, **policy)[0], TREE))


PLACES = {
    "match": lambda **policy: fm.match_partition_rules(RULES, TREE, mesh=MESH, **policy),
    "constraints": constraints,
    "optimizer": optimizer,
    "shard": lambda **policy: specs_of(fm.shard(TREE, SPECS, MESH, **policy)),
    "reshard": lambda **policy: specs_of(fm.reshard(PLACED, SPECS, **policy)),
    "callables": callables,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("policy", ["warn", "drop"])
def test_all_functions_leave_out_and_report_the_same_axes(place, policy):
    dropped = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        specs = PLACES[place](on_mismatch=policy, dropped=dropped)
    for name, spec in specs.items():  # the spec may end with None
        assert tuple(spec)[: len(LEFT[name])] == LEFT[name] and not any(spec[len(LEFT[name]) :])
    problems = sorted(finding.problem.replace(f" of rule {finding.path!r}", "") for finding in dropped)
    assert problems == [
        "dim 1 has size 6, not divisible by 4 (axes ('b',) of b=4)",
        "dim 1 names mesh axis 'c', which the mesh {'a': 2, 'b': 4} lacks",
        "dim 1 uses mesh axis 'b' that an earlier dim uses already",
        f"spec {SPECS['long']} has 3 dims, the array (8, 8) has 2",
    ]
    texts = [str(warning.message) for warning in caught if "left out of the sharding" in str(warning.message)]
    assert bool(texts) == (policy == "warn")
    assert all(any(str(finding) in text for text in texts) for finding in dropped if policy == "warn")


@pytest.mark.parametrize("place", PLACES)
def test_all_functions_raise_for_the_policy_error(place):
    with pytest.raises(fm.ShardingError, match=r"dim 1 |has 3 dims"):
        PLACES[place](on_mismatch="error", dropped=[])


def test_callables_report_once_per_shape():
    findings = []
    shard_fns, _ = fm.make_shard_and_gather_fns(SPECS, MESH, on_mismatch="drop", dropped=findings)
    for _ in range(2):
        assert shard_fns["odd"](TREE["odd"]).sharding.spec == P("a", None)
    assert [finding.path for finding in findings] == ["odd"]
