"""The optimizer update, split into programs of one group each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_mesh.mpmd.split.update import SHARED, MixedGroups, cut_by_group
from flax_mesh.program.program import is_var, trace

few = settings(max_examples=25, deadline=None)


@st.composite
def updates(draw):
    """Pairs (groups of the leaves, update of the leaves and a shared count) with elementwise operations and norms."""
    groups = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    kinds = ("clip", "decay", "max", "count", "own norm", "scalar leaf", "noise")
    ops = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))

    def update(leaves, count):
        metrics = []
        for op in ops:
            norm = jnp.sqrt(sum(jnp.sum(x * x) for x in leaves))
            if op == "clip":
                leaves = [x * jnp.minimum(1.0, 1.0 / norm) for x in leaves]
                metrics.append(norm)
            elif op == "max":
                largest = jnp.stack([jnp.max(jnp.abs(x)) for x in leaves]).max()
                leaves = [jnp.where(largest > 1, x / 2, x) for x in leaves]
            elif op == "own norm":
                leaves = [x / (1 + jnp.linalg.norm(x)) for x in leaves]
            elif op == "scalar leaf":
                leaves = [x * (1 + leaves[0].ravel()[0]) for x in leaves]
            elif op == "noise":  # arrays computed from scalars only
                leaves = [x + jnp.full(x.shape, 0.1 * norm) for x in leaves]
            else:
                leaves = [x - 0.1 * x if op == "decay" else x * count for x in leaves]
        return leaves, count + 1, metrics

    return groups, update


@few
@given(updates())
def test_running_the_parts_in_order_equals_the_unsplit_update(case):
    groups, update = case
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(2, 3) if i % 2 else (1,)).astype(np.float32) for i in range(len(groups))]
    program, _ = trace(update, values, np.float32(2))
    owners = [*groups, SHARED]
    every = (0, 1, 2)
    wanted = [*((g,) for g in groups), every, *[()] * (len(program.outputs) - len(groups) - 1)]
    parts, groups_of_outputs = cut_by_group(program, owners, wanted)
    env = {g: {} for g in every}
    for v, value, owner in zip(program.inputs, [*values, np.float32(2)], owners, strict=True):
        for group in every if owner == SHARED else (owner,):
            env[group][v] = value
    sizes, packs = {}, {}
    for part in parts:
        here = env[part.group]
        scalars = [x for key in part.receives for x in packs[key]]
        outs = part.program.call(*(here[v] for v in part.arguments), *scalars)
        for v in part.last_used:
            del here[v]  # like donation
        here |= dict(zip(part.results, outs, strict=False))
        packs[part.group, part.phase] = outs[len(part.results) :]
        sizes |= {v: v.aval.size for v in part.packs}
    assert set(sizes.values()) <= {1}  # only scalars are transferred
    for v, groups_, want in zip(program.outputs, groups_of_outputs, program.call(*values, np.float32(2)), strict=True):
        for group in groups_:
            np.testing.assert_array_equal(env[group][v] if is_var(v) else v.val, want)


@pytest.mark.parametrize("groups", [[0, 0, 1, 1], [0, 1] * 4, [0, 1, 2] * 3])
def test_a_norm_requires_one_exchange_and_groups_donate_their_leaves_in_the_last_phase(groups):
    def clip(leaves):
        norm = jnp.sqrt(sum(jnp.sum(x * x) for x in leaves))
        return [x / norm for x in leaves]

    program, _ = trace(clip, [jax.ShapeDtypeStruct((3,), jnp.float32)] * len(groups))
    parts, _ = cut_by_group(program, groups, [(g,) for g in groups])
    assert [(part.phase, part.group) for part in parts] == [(p, g) for p in (0, 1) for g in sorted(set(groups))]
    for group in set(groups):
        local = [part for part in parts if part.group == group]
        leaves = {leaf for leaf, owner in zip(program.inputs, groups, strict=True) if owner == group}
        assert not leaves & set(local[0].last_used)  # computes the norm
        assert leaves & set(local[-1].arguments) == leaves & set(local[-1].last_used) == leaves
        assert all(v in leaves or v not in program.inputs for part in local for v in part.arguments)
        assert all(sender != group for part in local for sender, _ in part.receives)


@few
@given(st.sets(st.integers(0, 4), min_size=2), st.data())
def test_joining_arrays_of_several_groups_raises_with_their_inputs(joined, data):
    joined = sorted(joined)
    groups = [data.draw(st.integers(0, 1)) for _ in range(5)]
    groups[joined[0]], groups[joined[1]] = 0, 1

    def update(leaves):
        return [2 * x for x in leaves], jnp.concatenate([3 * leaves[i] for i in joined])

    program, _ = trace(update, [jax.ShapeDtypeStruct((3,), jnp.float32)] * 5)
    with pytest.raises(MixedGroups, match="concatenate requires arrays of several groups") as error:
        cut_by_group(program, groups, [(g,) for g in groups] + [()])
    assert error.value.inputs == joined


def adam(clipped):
    """An update (leaves, moments, weight, count) -> (leaves, moments, count, gradient norm), like Adam."""

    def update(leaves, moments, weight, count):
        grads = [x / weight for x in leaves]
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads))
        moments = [0.9 * m + (g / norm if clipped else g) for m, g in zip(moments, grads, strict=True)]
        return [x - m / count for x, m in zip(leaves, moments, strict=True)], moments, count + 1, norm

    return update


@pytest.mark.parametrize("clipped", [False, True])
def test_a_part_outputs_only_results_and_values_that_a_later_phase_requires(clipped):
    groups = [0, 1, 2]
    leaf, scalar = jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    program, _ = trace(adam(clipped), [leaf] * 3, [leaf] * 3, scalar, scalar)
    # The weight is on group 2, like the loss; the norm is required on group 0.
    wanted = [*((g,) for g in groups * 2), (0, 1, 2), (0,)]
    parts, _ = cut_by_group(program, [*groups * 2, 2, SHARED], wanted)
    phases = {g: [part.phase for part in parts if part.group == g] for g in groups}
    for group in groups:
        written = [v for part in parts if part.group == group for v in part.results if v.aval.size > 1]
        results = [v for v, here in zip(program.outputs, wanted, strict=True) if here == (group,)]
        divided = [v for v in written if v not in results]
        assert len(written) == len(set(written)) and set(results) - {program.outputs[-1]} <= set(written)
        assert len(divided) == clipped  # the gradients whose norm is computed; no decayed moment
    if clipped:
        assert phases == {0: [1, 2], 1: [1, 2], 2: [0, 2]}
    else:
        assert phases == {0: [1, 2], 1: [1], 2: [0]}
        [norm_part] = [part for part in parts if part.phase == 2]
        assert [v.aval.shape for v in norm_part.results] == [()]  # no leaf waits for the norms of other groups
