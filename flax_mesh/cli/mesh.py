"""`flax-mesh mesh`: how a mesh is placed on the available devices."""

import argparse
import os
from collections.abc import Sequence

from flax_mesh.cli.common import DONE, check_writable, use_platform, write_file
from flax_mesh.errors import ConfigError
from flax_mesh.mesh import describe_mesh, draw_mesh_svg
from flax_mesh.mesh.create import create_mesh
from flax_mesh.mesh.shape import parse_mesh_shape
from flax_mesh.recipe.config import PLATFORM
from flax_mesh.recipe.target import AXIS_NAMES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print the links and rings of every mesh axis, and which axes cross slices."
    parser.epilog = "Exit codes: 0 success, 1 unexpected error, 2 invalid input."
    parser.add_argument(
        "shape", metavar="SHAPE", help='axis sizes, such as "dp:2,fsdp:-1,tp:2"; -1 is the remaining devices'
    )
    parser.add_argument(
        "--platform", default="auto", help="auto, cpu, cpu:N (N virtual devices), gpu or tpu (default: auto)"
    )
    parser.add_argument("--svg", metavar="FILE", type=os.path.expanduser, help="also write a picture")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    if not PLATFORM.fullmatch(arguments.platform):
        raise ConfigError(f"--platform must be auto, cpu, cpu:N (N devices), gpu or tpu, got {arguments.platform!r}")
    if arguments.svg is not None:
        check_writable("--svg", arguments.svg)
    use_platform(arguments.platform)
    try:
        shape = parse_mesh_shape(arguments.shape, AXIS_NAMES, omitted=1)
        shape = {name: size for name, size in shape.items() if size != 1} or {"dp": 1}
        mesh = create_mesh(tuple(shape.values()), tuple(shape))
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"{arguments.shape}: {error}") from error
    if arguments.svg is not None:
        write_file("--svg", arguments.svg, draw_mesh_svg(mesh))
    print(describe_mesh(mesh))
    return DONE
