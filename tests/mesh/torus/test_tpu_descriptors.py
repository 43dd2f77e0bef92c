"""Meshes of real TPU descriptors, without hardware. Requires the extra `tpu-aot` (libtpu). Each case runs in a separate
process, because libtpu may abort the process, and reads its environment variables before JAX is imported."""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is absent: install flax-mesh[tpu-aot]"
)

SCRIPT = """
import sys
import numpy as np
from jax.experimental import mesh_utils, topologies
from flax_mesh import create_mesh
from flax_mesh.mesh import describe_mesh
from flax_mesh.mesh.describe import read_layout

name, num_slices, dims = sys.argv[1], int(sys.argv[2]), tuple(map(int, sys.argv[3].split(",")))
options = {"num_slices": num_slices} if num_slices > 1 else {}
if name.startswith("v4"):
    options["chip_config_name"] = "megacore"
devices = topologies.get_topology_desc(name, platform="tpu", **options).devices
names = ("dp", "fsdp", "tp")[-len(dims):]
mesh = create_mesh(dims, names, devices=devices)
assert mesh.devices.shape == dims
assert {id(d) for d in mesh.devices.flat} == {id(d) for d in devices}
layout = read_layout(mesh)
assert layout.torus is not None, describe_mesh(mesh)
if num_slices > 1:
    inner = (dims[0] // num_slices, *dims[1:])
    theirs = mesh_utils.create_hybrid_device_mesh(
        inner, (num_slices, *[1] * (len(dims) - 1)), devices, allow_split_physical_axes=True)
    blocks = mesh.devices.reshape(num_slices, -1)
    assert [{d.slice_index for d in block} for block in blocks] == [{i} for i in range(num_slices)]
    assert all([d.coords for d in block] == [d.coords for d in blocks[0]] for block in blocks)
else:
    theirs = mesh_utils.create_device_mesh(dims, devices, allow_split_physical_axes=True)
same = all(a is b for a, b in zip(mesh.devices.flat, theirs.flat))
print("same as JAX" if same else "better than JAX" if "better than JAX" in describe_mesh(mesh) else "different")
"""

CASES = [
    ("v4:2x2x1", 1, (1, 2, 2), "same"),
    ("v4:4x4x4", 1, (1, 16, 4), "same"),
    ("v4:4x8x8", 1, (4, 4, 16), "better"),
    ("v5e:2x2", 1, (4,), "same"),
    ("v5e:2x4", 1, (2, 4), "same"),
    ("v5e:4x4", 1, (4, 4), "same"),
    ("v5e:4x4", 2, (2, 4, 4), "same"),
    ("v5p:2x2x2", 1, (8,), "same"),
    ("v5p:4x4x4", 1, (8, 8), "same"),
    ("v5p:2x2x2", 4, (4, 2, 4), "same"),
    ("v6e:4x4", 1, (16,), "same"),
    ("v6e:16x16", 1, (16, 16), "same"),
    ("tpu7x:2x2x2", 1, (2, 8), "same"),
    ("v3:4x4", 1, (4, 8), "same"),
]


@pytest.mark.parametrize(("name", "num_slices", "dims", "verdict"), CASES)
def test_meshes_of_real_descriptors(name, num_slices, dims, verdict):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, str(num_slices), ",".join(map(str, dims))],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.startswith(verdict), result.stdout
