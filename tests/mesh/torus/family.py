"""TPU tori of many sizes, and the assignments that differ from JAX's assignments."""

import math

from flax_mesh.mesh.torus.assign import choose_assignment
from flax_mesh.mesh.torus.torus import Torus, known_assignment, wraps_around
from tests.mesh.fakes import factor_shapes

SAMPLE = [("TPU v4", (4, 4, 4)), ("TPU v4", (4, 8, 8)), ("TPU v5 lite", (8, 16, 1))]


FAMILY = [
    *(("TPU v4", shape) for shape in [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 8), (8, 8, 8), (4, 4, 16)]),
    *(("TPU v4", shape) for shape in [(4, 8, 16), (4, 4, 12)]),
    *(("TPU v5 lite", shape) for shape in [(4, 4, 1), (4, 8, 1), (8, 8, 1), (16, 16, 1)]),
    *SAMPLE,
]


def torus_of(kind, shape):
    return Torus(kind, ("x", "y", "z"), shape, wraps_around(kind, shape))


def changes(family):
    """(torus, mesh shape, JAX's assignment, ours) for every case of a family in which the two differ."""
    for kind, shape in family:
        torus = torus_of(kind, shape)
        for num_axes in (2, 3, 4):
            for mesh_shape in factor_shapes(math.prod(shape), num_axes):
                if 1 in mesh_shape:
                    continue
                for split in (False, True):
                    try:
                        known = known_assignment(shape, mesh_shape, allow_split=split)
                    except NotImplementedError:
                        continue
                    ours = choose_assignment(torus, mesh_shape, allow_split=split)
                    if ours != known:
                        yield torus, mesh_shape, known, ours
