"""describe_mesh and draw_mesh_svg, whose output depends only on the devices of the mesh."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

from flax_mesh import create_mesh
from flax_mesh.cli import main
from flax_mesh.mesh import describe_mesh, draw_mesh_svg
from flax_mesh.mesh.describe import read_layout
from flax_mesh.mesh.torus.assign import assignment_cost
from tests.mesh.fakes import factor_shapes, gpu_hosts, tpu_slice, tpu_slices


def test_a_cpu_mesh_is_described_without_a_torus():
    text = describe_mesh(create_mesh((4, 2), ("dp", "tp")))
    assert "mesh dp:4,tp:2, 8 devices, axis types auto" in text
    assert "1 process with 8 devices; cpu devices do not form a torus" in text
    assert "0,0  0,1\n  1,0  1,1\n  2,0  2,1\n  3,0  3,1" in text


def test_rings_and_lines_are_distinguished():
    text = describe_mesh(create_mesh((16, 4), ("fsdp", "tp"), devices=tpu_slice("TPU v4", (4, 4, 4))))
    assert re.search(r"fsdp +16 +y 4 ring, z 4 ring", text)
    assert re.search(r"tp +4 +x 4 ring +1 ", text)
    assert "assignment: the same as JAX's" in text
    text = describe_mesh(create_mesh((4, 4), ("fsdp", "tp"), devices=tpu_slice("TPU v5 lite", (4, 4))))
    assert re.search(r"tp +4 +x 4 line", text)
    assert "wrapping along none" in text
    text = describe_mesh(create_mesh((4,), ("tp",), devices=tpu_slice("TPU v5 lite", (2, 2))))
    assert "4 in ring order" in text and "as in JAX" in text


def test_improvements_over_jax_are_reported():
    mesh = create_mesh((4, 4, 16), ("dp", "fsdp", "tp"), devices=tpu_slice("TPU v4", (4, 8, 8)))
    text = describe_mesh(mesh)
    assert re.search(r"dp +4 +y 4 of 8 \(stride 2\)", text)
    assert "better than JAX's: fsdp gathers 2.67 times as fast, hops 1 instead of 2" in text


def test_axes_over_the_slow_network_are_reported():
    text = describe_mesh(create_mesh((2, 4, 4), ("dp", "fsdp", "tp"), devices=tpu_slices(2, "TPU v5 lite", (4, 4))))
    assert "2 slices of TPU v5 lite 4x4x1" in text
    assert re.search(r"dp +2 +2 slices over DCN", text)
    text = describe_mesh(create_mesh((4, 8), ("dp", "tp"), devices=gpu_hosts(4, 8)))
    assert re.search(r"dp +4 +4 processes over DCN", text)
    joined = [replace(device, slice_index=0) for device in gpu_hosts(4, 8)]  # a fast network connects the four hosts
    assert "DCN" not in describe_mesh(create_mesh((4, 8), ("dp", "tp"), devices=joined))


def test_an_abstract_mesh_and_an_incomplete_cuboid_have_a_description():
    abstract = AbstractMesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    assert "an abstract mesh has no devices" in describe_mesh(abstract)
    devices = np.array(tpu_slice("TPU v4", (2, 2, 1))[:3], dtype=object)
    assert "there is a hole" in describe_mesh(Mesh(devices, ("dp",), axis_types=(AxisType.Auto,)))


@pytest.mark.parametrize("shape", [(2, 2, 4), (4, 4, 4), (4, 8, 1)])
def test_the_layout_of_a_mesh_is_the_assignment_that_created_it(shape):
    """For all meshes of three axes; the hops of the assignment are those measured on the mesh."""
    kind = "TPU v5 lite" if 1 in shape else "TPU v4"
    for mesh_shape in factor_shapes(int(np.prod(shape)), 3):
        layout = read_layout(create_mesh(mesh_shape, ("dp", "fsdp", "tp"), devices=tpu_slice(kind, shape)))
        assert layout.assignment is not None and layout.torus is not None and layout.hops is not None
        assert np.array(layout.assignment).prod(axis=0).tolist() == list(mesh_shape)
        hops = [cost.hops for cost in assignment_cost(layout.torus, layout.assignment)]
        assert hops == pytest.approx(layout.hops)


@pytest.mark.parametrize(
    ("devices", "dims"),
    [
        (tpu_slice("TPU v4", (4, 4, 4)), (1, 16, 4)),
        (tpu_slices(2, "TPU v5 lite", (4, 4)), (2, 4, 4)),
        (gpu_hosts(2, 8), (2, 2, 4)),
        (None, (2, 2, 2)),
    ],
)
def test_the_drawing_is_valid_and_contains_every_device_once(devices, dims):
    mesh = create_mesh(dims, ("dp", "fsdp", "tp"), devices=devices)
    svg = draw_mesh_svg(mesh)
    root = ElementTree.fromstring(svg)
    boxes = [element for element in root.iter("{http://www.w3.org/2000/svg}rect") if element.get("rx")]
    assert len(boxes) == mesh.devices.size
    assert len({(box.get("x"), box.get("y")) for box in boxes}) == mesh.devices.size
    assert len({box.get("fill") for box in boxes}) == mesh.devices.size // dims[-1]  # one color per tp group
    assert svg == draw_mesh_svg(mesh)


def test_wraparound_links_are_drawn_as_stubs():
    ring = draw_mesh_svg(create_mesh((1, 16), ("dp", "tp"), devices=tpu_slice("TPU v5 lite", (16, 1))))
    line = draw_mesh_svg(create_mesh((1, 8), ("dp", "tp"), devices=tpu_slice("TPU v6e", (8, 1))))
    assert ring.count("<line") == 15 + 2
    assert line.count("<line") == 7


def test_the_command_prints_and_draws_a_mesh(tmp_path, capsys):
    svg = tmp_path / "mesh.svg"
    assert main(["mesh", "dp:2,tp:-1", "--svg", str(svg)]) == 0
    assert "mesh dp:2,tp:4, 8 devices" in capsys.readouterr().out
    assert svg.read_text().startswith("<svg")
    wrong = {"dp:3": "flax-mesh: dp:3: ", "dq:2": "unknown axis 'dq'", "dp:8 more": "unexpected arguments: more"}
    wrong |= {"dp:8 --platform abacus": "--platform must be auto, cpu", "dp:8 --svg no/file.svg": "cannot be written"}
    for words, message in wrong.items():
        assert main(["mesh", *words.split()]) == 2, words
        assert message in capsys.readouterr().err
