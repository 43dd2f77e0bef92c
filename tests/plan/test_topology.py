"""Topologies from texts and from devices, and the networks of mesh axes on them."""

import dataclasses
import math
import tracemalloc

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_mesh import create_mesh
from flax_mesh.errors import ConfigError
from flax_mesh.hardware import CHIPS, load_chip
from flax_mesh.hlo.collectives import KINDS, Collective
from flax_mesh.mesh.describe import read_layout
from flax_mesh.mesh.torus.assign import axis_phases, gather_seconds, strides_of
from flax_mesh.plan.topology import Network, network_of, parse_topology, resolve_mesh, topology_of_devices
from tests.mesh.fakes import factor_shapes, gpu_hosts, tpu_slice, tpu_slices

GB, US = 1e9, 1e-6
V5P = {chip.name: chip for chip in CHIPS}["v5p"]


def network(text: str, mesh: dict[str, int], *axes: str, chip=None) -> Network:
    return network_of(parse_topology(text, chip), mesh, axes)


@pytest.mark.parametrize(
    ("text", "devices", "slices", "shape", "domains"),
    [
        ("v5p:4x4x8", 128, 1, (4, 4, 8), 1),
        ("V5P:16x16x16*2", 8192, 2, (16, 16, 16), 2),
        (" v5e:4x4 ", 16, 1, (4, 4), 1),
        ("v7x:4x4x4", 128, 1, (4, 4, 4), 1),
        ("v7x:4x4x4*3", 384, 3, (4, 4, 4), 3),
        ("H100:2x8", 16, 1, (2, 8), 2),
        ("h100-pcie:3X4", 12, 1, (3, 4), 3),
        ("gb200:18x4", 72, 1, (18, 4), 1),
        ("gb200:36x4", 144, 1, (36, 4), 2),
        ("gb200:32x4", 128, 1, (32, 4), 2),  # two domains of 64
        ("cpu:8", 8, 1, (1, 8), 1),
        ("cpu:2x4", 8, 1, (2, 4), 2),
    ],
)
def test_topology_of_a_text(text, devices, slices, shape, domains):
    topology = parse_topology(text)
    assert (topology.num_devices, topology.num_slices, topology.slice_shape) == (devices, slices, shape)
    assert topology.num_domains == domains
    assert topology.text == text.strip().lower() and parse_topology(topology.text) == topology


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("v6e-8", "v6e:2x4"), ("V6E-256", "v6e:16x16"), ("v5litepod-16", "v5e:4x4"), ("v5e-1", "v5e:1x1"),
        ("v5p-8", "v5p:1x2x2"), ("v5p-128", "v5p:4x4x4"), ("v5p-17920", "v5p:16x20x28"), ("v4-32", "v4:2x2x4"),
        ("v3-8", "v3:2x2"), ("v5litepod-256*2", "v5e:16x16*2"),
    ],
)  # fmt: skip
def test_the_name_of_a_slice_in_the_cloud_is_a_topology(name, text):
    """The names of v3, v4 and v5p count two TensorCores per chip, the others chips."""
    assert parse_topology(name) == parse_topology(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        *((text, r"must be a chip and its numbers, such as v5p:4x4x8, .* or cpu:8") for text in
          ("", "v5p", "v5p:", ":4", "v7x-128", "v5p-", "v5p-128x2", "v5p:4x4x", "v5p:-4x4x4", "v5p:4x4x4*", "v5p:4*2x4",
           "cpu:8;rm", "v5p:٣x4x4", "cpu:" + "9" * 5000, "v5p:4 x 4 x 4", "x\0:3")),
        ("v9:4x4", r"unknown chip 'v9'; known: v3, v4, v5e, v5p, .*cpu\. .* run.hardware=FILE"),
        ("v5p:4x4", r"v5p needs 3 numbers \(chips along x, y, z\), such as v5p:4x4x8; got 4x4"),
        ("v5e:4x4x1", r"v5e needs 2 numbers \(chips along x, y\), such as v5e:4x8; got 4x4x1"),
        ("h100:16", r"h100 needs 2 numbers \(hosts x GPUs\), such as h100:2x8; got 16"),
        ("cpu:2x4x2", r"cpu needs 1 number \(devices\), such as cpu:8; got 2x4x2"),
        *((text, r"all numbers must be at least 1") for text in ("v5p:0x4x4", "v5p:4x4x4*0", "cpu:0", "h100:2x0")),
        ("v5e:32x8", r"32x8 is larger than a pod of v5e, 16x16 chips; use several slices, such as v5e:16x16\*2"),
        ("v5p:16x20x29", r"larger than a pod of v5p"),
        ("v5p:4x4x4*99999999", r"at most 2,147,483,647 devices are possible"),
        ("h100:999999999999x8", r"at most 2,147,483,647 devices are possible"),
        ("h100:2x3", r"3 GPUs per host do not divide the 8 of an NVLink domain; use 1, 2, 4, 8"),
        ("h100:2x16", r"16 GPUs per host do not divide"),
        ("v6e-7", r"no slice of v6e has the name v6e-7, whose number counts chips; the nearest: v6e-4, v6e-8$"),
        ("v5p-127", r"v5p-127, whose number counts TensorCores, 2 per chip; the nearest: v5p-64, v5p-128$"),
        ("v5litepod-512", r"the nearest: v5litepod-256$"),
        ("v4-0", r"the nearest: v4-2$"),
        ("v5p:3x5x7", r"sides of a slice of v5p must be 1, 2 or multiples of 4 chips, got 3, 5, 7; .* v5p:4x8x8$"),
        ("v6e:2x6", r"must be 1, 2 or multiples of 4 chips, got 6; the next larger slice is v6e:2x8$"),
        ("v4:15x15x17", r"must be 1, 2 or multiples of 4 chips, got 15, 15, 17$"),  # 16x16x20 is larger than a pod
        ("h100:2x8*2", r"\*2 is the number of TPU slices; write more hosts instead"),
    ],
)  # fmt: skip
def test_bad_topologies_are_refused_in_one_line(text, line):
    with pytest.raises(ConfigError, match=line) as caught:
        parse_topology(text)
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 400


@pytest.mark.slow
@given(st.text(max_size=30) | st.from_regex(r"\A(v5p|v5e|h100|cpu|v7x):[0-9x*]{0,12}\Z"))
def test_every_text_is_a_topology_or_a_config_error(text):
    try:
        topology = parse_topology(text)
    except ConfigError as error:
        assert len(error.problems) == 1
    else:
        assert parse_topology(topology.text) == topology


def test_the_chip_of_a_file_can_be_named(tmp_path):
    (tmp_path / "chip.toml").write_text('base = "v5p"\nname = "mine"\nlink_bandwidth = 200e9\n')
    chip = load_chip(tmp_path / "chip.toml")
    mesh = {"fsdp": 64}
    fast, slow = network("mine:4x4x4", mesh, "fsdp", chip=chip), network("v5p:4x4x4", mesh, "fsdp", chip=chip)
    assert slow.phases[0].bandwidth == fast.phases[0].bandwidth / 2
    with pytest.raises(ConfigError, match=r"unknown chip 'mine'"):
        parse_topology("mine:4x4x4")


# Seconds computed by hand: bytes per device / bandwidth + hops.


def test_one_ring_and_two_rings_of_16_on_v5p():
    """x is a ring of 16 chips: two links of 90 GB/s, 8 hops to the other side."""
    found = network("v5p:16x16x16", {"dp": 16, "fsdp": 16, "tp": 16}, "tp")
    assert [(phase.kind, phase.size, phase.bandwidth) for phase in found.phases] == [("ici", 16, 180 * GB)]
    gather = 1 * GB * 15 / 16 / (180 * GB) + 8 * US
    assert found.seconds("all-gather", 1 * GB) == found.seconds("reduce-scatter", 1 * GB) == pytest.approx(gather)
    assert found.seconds("all-reduce", 1 * GB) == pytest.approx(2 * gather)
    # Each of 16 devices sends 1/16 GB to the 8 on either side: 64 distances of 1/16 GB over two links of each device.
    assert found.seconds("all-to-all", 1 * GB) == pytest.approx(64 / 16 / 2 / 90 + 8 * US)
    assert found.seconds("collective-permute", 1 * GB) == pytest.approx(1 / 90 + 1 * US)
    assert found.split(5.0) == (5.0, 0.0)
    two = network("v5p:16x16x16", {"fsdp": 256, "tp": 16}, "fsdp")
    assert two.seconds("all-gather", 1 * GB) == pytest.approx(255 / 256 / 360 + 16 * US)  # two rings concurrently


def test_line_on_v5e_4x4():
    """An axis of 4 is a line of links of 45 GB/s: one direction at a time, 3 hops."""
    found = network("v5e:4x4", {"fsdp": 4, "tp": 4}, "tp")
    assert found.seconds("all-gather", 1 * GB) == pytest.approx(3 / 4 / 45 + 3 * US)
    assert found.seconds("all-to-all", 1 * GB) == pytest.approx(2 * 2 / 4 / 45 + 3 * US)  # 2x2 quarters in the middle


def test_a_part_of_an_axis_shares_its_links():
    """fsdp:2,tp:8 on 4x4 is the drawing of mesh/torus/assign.py: two groups of fsdp share each link along y."""
    mesh = {"fsdp": 2, "tp": 8}
    assert [tuple(p[1:3]) for p in network("v5e:4x4", mesh, "fsdp").phases] == [(2, 45 / 2 * GB)]
    found = network("v5e:4x4", mesh, "tp")
    assert [tuple(p[1:3]) for p in found.phases] == [(2, 45 * GB), (4, 45 * GB)]
    assert found.seconds("all-gather", 1 * GB) == pytest.approx((1 / 8 + 2 * 3 / 8) / 45 + 4 * US)
    assert [tuple(p[1:3]) for p in network("v5e:4x4", mesh, "tp", "fsdp").phases] == [(16, 90 * GB)]


def test_axes_that_are_not_neighbors_share_links_with_those_between():
    """dp:2,fsdp:2,tp:2 on a line of 8 chips: four groups of dp share the link in the middle."""
    mesh = {"dp": 2, "fsdp": 2, "tp": 2}
    assert [tuple(p[1:3]) for p in network("v5e:8x1", mesh, "dp", "tp").phases] == [(2, 45 / 4 * GB), (2, 45 * GB)]
    assert [tuple(p[1:3]) for p in network("v5e:8x1", mesh, "fsdp", "tp").phases] == [(4, 45 * GB)]
    assert [tuple(p[1:3]) for p in network("v5e:8x1", mesh, "dp", "fsdp").phases] == [(4, 45 / 2 * GB)]
    found = network("v5e:8x1", mesh, "dp")
    assert found.seconds("collective-permute", 1 * GB) == pytest.approx(4 / 45 + 4 * US)


def test_h100_across_two_nodes():
    """fsdp:16 on 2x8: 2 nodes over 50 GB/s, then 8 GPUs over 370 of 450 GB/s."""
    found = network("h100:2x8", {"fsdp": 16}, "fsdp")
    assert [(phase.kind, phase.size) for phase in found.phases] == [("dcn", 2), ("nvlink", 8)]
    gather = 1 / 16 / 50 + 2 * 7 / 16 / 370 + 2 * US + 7 * US
    assert found.seconds("all-gather", 1 * GB) == pytest.approx(gather)
    assert found.seconds("all-to-all", 1 * GB) == pytest.approx(1 / 2 / 50 + 1 / 2 * 7 / 8 / 370 + 9 * US)
    assert found.split(15.0) == pytest.approx((14.0, 1.0))
    assert found.split(15.0, "all-to-all") == pytest.approx((7.0, 8.0))
    assert found.split(16.0, "collective-permute") == pytest.approx((14.0, 2.0))
    inside = network("h100:2x8", {"fsdp": 2, "tp": 8}, "tp")
    assert inside.seconds("all-gather", 1 * GB) == pytest.approx(7 / 8 / 370 + 7 * US)
    assert inside.split(1.0) == (1.0, 0.0)


def test_axes_over_the_network_of_two_slices():
    text, mesh = "v5p:16x16x16*2", {"dp": 2, "fsdp": 256, "tp": 16}
    assert network(text, mesh, "dp").seconds("all-reduce", 1 * GB) == pytest.approx(2 * (1 / 2 / 6.25 + 2 * US))
    assert network(text, mesh, "dp").split(1.0) == (0.0, 1.0)
    assert {phase.kind for phase in network(text, mesh, "fsdp", "tp").phases} == {"ici"}
    both = network(text, mesh, "fsdp", "dp")
    assert both.seconds("all-gather", 1 * GB) == pytest.approx(1 / 512 / 6.25 + 2 * 255 / 512 / 360 + 2 * US + 16 * US)
    assert both.split(511.0) == pytest.approx((510.0, 1.0))
    # an axis that is partly in a slice
    found = network("v5p:4x4x4*2", {"fsdp": 8, "tp": 16}, "fsdp")
    assert sorted((phase.kind, phase.size) for phase in found.phases) == [("dcn", 2), ("ici", 4)]
    assert found.split(7.0) == pytest.approx((6.0, 1.0))
    # pp is the outermost axis and split over slices first
    mesh = {"fsdp": 16, "tp": 4, "pp": 2}
    assert list(resolve_mesh(parse_topology("v5p:4x4x4*2"), mesh)) == ["pp", "fsdp", "tp"]
    found = network("v5p:4x4x4*2", mesh, "pp")
    assert [phase.kind for phase in found.phases] == ["dcn"] and found.split(1.0, "collective-permute") == (0.0, 1.0)


def test_two_devices_of_a_chip_share_its_links():
    """A v7x chip of two devices receives a gathered array once, and its devices exchange their halves."""
    found = network("v7x:4x4x4", {"fsdp": 128}, "fsdp")
    assert [(phase.kind, phase.size, phase.bandwidth) for phase in found.phases] == [
        ("ici", 64, 6 * 90 / 2 * GB), ("ici", 2, 6 * 90 * GB)
    ]  # fmt: skip
    over_network = network("v7x:4x4x4*2", {"dp": 2, "fsdp": 128}, "dp")
    assert over_network.phases[0].bandwidth == 12.5 / 2 * GB


def test_one_device_needs_no_network():
    found = network("cpu:8", {"dp": 1, "fsdp": 8}, "dp")
    assert (found.size, found.seconds("all-reduce", 1e9), found.split(0.0)) == (1, 0.0, (0.0, 0.0))
    assert [phase.kind for phase in network("cpu:8", {"fsdp": 8}, "fsdp").phases] == ["host"]


@pytest.mark.parametrize(("kind", "shape"), [("TPU v5", (4, 4, 8)), ("TPU v4", (4, 8, 8)), ("TPU v6 lite", (16, 8))])
def test_seconds_of_an_axis_follow_from_the_mesh_that_create_mesh_creates(kind, shape):
    """`read_layout` finds the assignment from the coordinates of the mesh; without latency the times are the same."""
    devices = tpu_slice(kind, shape)
    topology = topology_of_devices(devices)
    topology = dataclasses.replace(topology, chip=dataclasses.replace(topology.chip, hop_latency=0.0))
    names, compared = ("dp", "fsdp", "tp"), 0
    for dims in list(factor_shapes(len(devices), 3))[::3]:
        layout = read_layout(create_mesh(dims, names, devices=devices))
        if layout.assignment is None or layout.torus is None:  # the order of size-1 axes, or a ring order
            continue
        mesh, strides = dict(zip(names, dims, strict=True)), strides_of(layout.assignment)
        for i, name in enumerate(names):
            columns = ([row[i] for row in layout.assignment], [row[i] for row in strides])
            seconds = gather_seconds(axis_phases(layout.torus, *columns), 1e9)
            assert network_of(topology, mesh, (name,)).seconds("all-gather", 1e9) == pytest.approx(seconds)
            compared += 1
    assert compared >= 18


def test_the_two_cores_of_a_chip_are_placed_as_create_mesh_places_them():
    devices = tpu_slice("TPU7x", (4, 4, 4), cores=2)
    mesh = {"dp": 4, "fsdp": 16, "tp": 2}
    layout = read_layout(create_mesh(tuple(mesh.values()), tuple(mesh), devices=devices))
    assert layout.assignment is not None and layout.assignment[3] == (1, 1, 2)  # the cores are tp
    found = network_of(topology_of_devices(devices), mesh, ("tp",))
    assert [(phase.size, phase.bandwidth) for phase in found.phases] == [(2, 540 * GB)]


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (tpu_slice("TPU v5", (4, 4, 8)), "v5p:4x4x8"),
        (tpu_slice("TPU v5 lite", (4, 4)), "v5e:4x4"),
        (tpu_slice("TPU7x", (2, 2, 2), cores=2), "v7x:2x2x2"),
        (tpu_slice("TPU v3", (4, 4), cores=2), "v3:4x4"),
        (tpu_slices(2, "TPU v4", (2, 2, 4)), "v4:2x2x4*2"),
        (gpu_hosts(2, 8), "h100:2x8"),
        ([dataclasses.replace(device, platform="cpu", device_kind="cpu") for device in gpu_hosts(2, 4)], "cpu:2x4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_topology_of_devices(devices, text):
    assert topology_of_devices(devices) == parse_topology(text)
    assert topology_of_devices(jax.devices()) == parse_topology("cpu:8")


@pytest.mark.parametrize(
    ("devices", "chip", "line"),
    [
        (tpu_slice("TPU v9", (2, 2, 1)), None, r"no figures are known for 'TPU v9'; .*run.hardware=FILE"),
        (tpu_slice("TPU v4", (2, 2, 1))[:3], None, r"do not form a torus: .* a hole at"),
        (tpu_slice("TPU v5p", (2, 2, 1), cores=2), None, r"v5p must have 1 device per chip, but 8 devices"),
        (tpu_slices(2, "TPU v4", (2, 2, 1))[1:], None, r"slices of equal size, but they have 3, 4 devices"),
        (gpu_hosts(2, 8), V5P, r"v5p is a chip of tpu, but the devices are gpu devices"),
    ],
)
def test_devices_without_a_topology_are_refused(devices, chip, line):
    with pytest.raises(ConfigError, match=line):
        topology_of_devices(devices, chip)


def test_a_mesh_of_another_size_is_refused_with_repairs():
    topology = parse_topology("v5p:4x4x8")
    line = r"mesh.shape dp:2,fsdp:32: the sizes multiply to 64, not to 128, the number of devices of v5p:4x4x8\. .*:64"
    with pytest.raises(ConfigError, match=line):
        network_of(topology, {"dp": 2, "fsdp": 32}, ("dp",))
    with pytest.raises(ConfigError, match=r"multiply to 3, which does not divide 128"):
        resolve_mesh(topology, {"dp": 3, "fsdp": -1})
    assert resolve_mesh(topology, {"dp": 2, "fsdp": -1}) == {"dp": 2, "fsdp": 64}
    with pytest.raises(ValueError, match=r"axes must be axes of the mesh, dp, fsdp; got tp"):
        network_of(topology, {"dp": 2, "fsdp": 64}, ("tp",))
    with pytest.raises(ValueError, match=r"kind must be one of all-gather, .*got 'send'"):
        network_of(topology, {"fsdp": 128}, ("fsdp",)).seconds("send", 1)


TEXTS = ("v5p:4x4x8", "v5p:4x4x4*4", "v5e:8x16", "v7x:2x4x4*2", "h100:4x8", "gb200:8x4", "cpu:12", "v4:4x4x12*2")
NAMES = ("pp", "dp", "fsdp", "ep", "tp")


@st.composite
def networks(draw):
    topology = parse_topology(draw(st.sampled_from(TEXTS)))
    left, mesh = topology.num_devices, {}
    for name in NAMES[:-1]:
        mesh[name] = draw(st.sampled_from([size for size in range(1, left + 1) if left % size == 0]))
        left //= mesh[name]
    axes = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
    return topology, {**mesh, "tp": left}, tuple(axes)


@settings(max_examples=60, deadline=None)
@given(networks(), st.sampled_from(KINDS), st.sampled_from(["link_bandwidth", "network_bandwidth"]), st.floats(1, 50))
def test_bytes_are_conserved_and_more_bytes_or_a_smaller_bandwidth_are_never_faster(case, kind, name, factor):
    topology, mesh, axes = case
    found = network_of(topology, mesh, axes)
    assert found.size == math.prod(mesh[axis] for axis in axes)
    payload = found.size * 2**20
    sent = Collective(kind, axes, found.size, payload, 1, True, "").sent_bytes
    fast, slow = found.split(sent, kind)
    assert fast + slow == pytest.approx(sent) and fast >= -1e-6 and slow >= 0
    assert (slow > 0) == any(phase.kind == "dcn" for phase in found.phases)
    # A device cannot receive faster than over all of its links, nor what must come from outside over its network.
    links = topology.chip.reachable_link * max(topology.chip.links, 1) * 2
    assert found.seconds(kind, payload) >= fast / links if found.size > 1 else found.seconds(kind, payload) == 0
    assert found.seconds(kind, 2**24) <= found.seconds(kind, 2**25)
    assert found.seconds("all-reduce", 2**24) == pytest.approx(2 * found.seconds("all-gather", 2**24))
    chip = dataclasses.replace(topology.chip, **{name: getattr(topology.chip, name) * factor})
    faster = network_of(dataclasses.replace(topology, chip=chip), mesh, axes)
    assert faster.seconds(kind, 2**24) <= found.seconds(kind, 2**24) * (1 + 1e-9)


def test_thousands_of_devices_need_no_object_each():
    topology = parse_topology("v5p:16x16x16*2")
    mesh = {"pp": 2, "dp": 4, "fsdp": 64, "ep": 2, "tp": 4, "sp": 2}
    tracemalloc.start()
    try:
        for axes in (("fsdp", "dp"), ("tp",), ("sp", "fsdp"), ("pp",), ("ep", "tp")):
            assert network_of(topology, mesh, axes).size == math.prod(mesh[axis] for axis in axes)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
