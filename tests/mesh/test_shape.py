"""Sizes, names and strings of mesh axes: inference, parsing, and errors."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_mesh import calculate_host_mesh_shape
from flax_mesh.mesh.shape import (
    check_axis_names,
    format_mesh_shape,
    parse_mesh_shape,
    resolve_dims,
    split_between_hosts,
)

NAMES = ("dp", "fsdp", "tp")


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((-1, -1, 2), r"dp:-1,fsdp:-1,tp:2: only one size can be -1, found 2 \(dp, fsdp\)"),
        ((0, 4, -3), r"sizes must be positive, or -1 for one of them; found dp:0, tp:-3"),
        ((3, -1, 1), r"multiply to 3, which does not divide 8, the number of devices, so fsdp cannot.*Valid.*dp:2"),
        ((2, 2, 1), r"multiply to 4, not to 8, the number of devices. Valid changes of one size: dp:4, fsdp:4, tp:2"),
        ((3, 5, 7), r"multiply to 105, not to 8, the number of devices. Sizes must multiply to 8"),
        ((2, 4), r"2 sizes \(2, 4\) for 3 axes \('dp', 'fsdp', 'tp'\)"),
        ((2.0, 4, 1), r"must contain integers, got 2.0"),
        ((True, 8, 1), r"must contain integers, got True"),
        (8, r"must be a sequence of integers, got 8"),
    ],
)
def test_invalid_sizes_are_reported(dims, message):
    with pytest.raises(ValueError, match=message):
        resolve_dims(dims, NAMES, 8)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("dp", "tp", "dp"), r"must be unique, but .* contains dp more than once"),
        ("dp", r"got the string 'dp'. Write \('dp',\)"),
        (("dp", 3, ""), r"non-empty strings, got 3, ''"),
        ((), "at least one axis"),
    ],
)
def test_invalid_names_are_reported(names, message):
    with pytest.raises(ValueError, match=message):
        check_axis_names(names)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("dp:2,fsdp:-1,tp:4", {"dp": 2, "fsdp": -1, "tp": 4}),
        (" tp = 4 , dp:2, fsdp=1 ", {"tp": 4, "dp": 2, "fsdp": 1}),
        ("2, 4,-1", {"dp": 2, "fsdp": 4, "tp": -1}),
    ],
)
def test_strings_are_parsed(text, result):
    shape = parse_mesh_shape(text, NAMES)
    assert shape == result
    assert list(shape) == list(result)  # the order matters: it is the order of the mesh axes
    assert list(parse_mesh_shape("tp:4,dp:2", NAMES, omitted=1).items()) == [("tp", 4), ("dp", 2), ("fsdp", 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp:2,xx:4,fsdp:1,tp:1", "unknown axis 'xx': the axes are dp, fsdp, tp"),
        ("dp:2,tp:4", "missing axis 'fsdp': add fsdp:1"),
        ("dp:2,dp:4,fsdp:1,tp:1", "duplicate axis 'dp': it is 2 and then 4"),
        ("dp:2,fsdp,tp:1", "'fsdp' is malformed: write name:size"),
        ("dp:two,fsdp:1,tp:1", "'dp:two' is malformed"),
        ("dp:1,fsdp:1,tp:1,", "'' is malformed"),
        ("2,4", "2 sizes for 3 axes dp, fsdp, tp"),
        ("2,x,1", "'x' is malformed: write an integer"),
        ("dp:0,fsdp:-2,tp:1", "dp has size 0.*fsdp has size -2"),
        ("-1,-1,2", r"only one size can be -1, found 2 \(dp, fsdp\)"),
        ("xx:2,dp:a,tp:2,tp:3", "unknown axis 'xx'.*malformed.*duplicate axis 'tp'.*missing axis 'fsdp'"),
        ("", "must contain axis sizes, got ''"),
        (None, "must contain axis sizes, got None"),
    ],
)
def test_invalid_strings_are_reported(text, message):
    with pytest.raises(ValueError, match=message):
        parse_mesh_shape(text, NAMES)


@given(st.dictionaries(st.sampled_from(NAMES), st.integers(1, 64), min_size=3))
def test_parsing_inverts_formatting(sizes):
    text = format_mesh_shape(list(sizes), list(sizes.values()))
    assert list(parse_mesh_shape(text, NAMES).items()) == list(sizes.items())


def test_host_shapes_split_the_leading_axes_first():
    cases = {((2, 4), 4, 2): (1, 4), ((2, 3, 4), 4, 6): (1, 1, 4), ((3, 8), 12, 2): (3, 4), ((4, 6), 4, 6): (2, 2)}
    assert {case: calculate_host_mesh_shape(*case) for case in cases} == cases
    assert calculate_host_mesh_shape((2, 4)) == (2, 4)  # of this run
    with pytest.raises(ValueError, match=r"\(3, 4\) has 12 devices, but 2 processes with 5 devices each have 10"):
        calculate_host_mesh_shape((3, 4), 5, 2)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 24))
def test_the_split_between_hosts_is_the_lexicographically_largest(shape, hosts):
    valid = [
        splits
        for splits in itertools.product(*([d for d in range(1, size + 1) if size % d == 0] for size in shape))
        if math.prod(splits) == hosts
    ]
    assert split_between_hosts(shape, hosts) == (max(valid) if valid else None)


@given(st.lists(st.integers(1, 6), min_size=3, max_size=3), st.integers(0, 2))
def test_inference_restores_any_single_size(sizes, hidden):
    dims = [-1 if i == hidden else size for i, size in enumerate(sizes)]
    assert resolve_dims(dims, NAMES, math.prod(sizes)) == resolve_dims(sizes, NAMES, math.prod(sizes)) == tuple(sizes)
