"""The drawings and the table in docs/mesh.md match the code."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from flax_mesh.mesh import draw_mesh_svg
from tests.mesh.torus.family import FAMILY, changes

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "mesh.md").read_text()
DRAWINGS = {"cube": "mesh-cube.svg", "pair": "mesh-slices.svg"}  # variable of the page -> drawing


def test_the_drawings_of_the_page_are_current():
    namespace: dict[str, Any] = {"__name__": "mesh_page"}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(block, "docs/mesh.md", "exec"), namespace)
    for variable, name in DRAWINGS.items():
        assert name in PAGE
        assert (DOCS / name).read_text() == draw_mesh_svg(namespace[variable])


@pytest.mark.slow
def test_the_table_of_better_meshes_is_complete():
    listed = set()
    for kind, sides, shapes in re.findall(r"^\| (v4|v5e) \| ([\dx]+) \| ([\dx, ]+) \|", PAGE, re.MULTILINE):
        listed |= {(kind, sides, shape) for shape in shapes.split(", ")}
    found = {
        (
            "v5e" if torus.kind == "TPU v5 lite" else "v4",
            "x".join(map(str, torus.shape[:2] if torus.kind == "TPU v5 lite" else torus.shape)),
            "x".join(map(str, mesh_shape)),
        )
        for torus, mesh_shape, _, _ in changes(FAMILY)
    }
    assert listed == found
