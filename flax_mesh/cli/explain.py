"""`flax-mesh explain`: the sharding of every array of a recipe, without devices."""

import argparse
import json
import os
from collections.abc import Sequence

from flax_mesh.cli.common import DONE, FINDINGS, check_writable, config_of, files_read, table_width, write_file
from flax_mesh.cli.text.arguments import add_recipe
from flax_mesh.recipe.explain import explain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the mesh, every array with its rule and bytes per device, and findings. Needs no devices."
    )
    parser.epilog = "Exit codes: 0 no findings, 1 unexpected error, 2 invalid input, 3 findings."
    add_recipe(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument(
        "--html",
        metavar="FILE",
        type=os.path.expanduser,
        help="write an HTML page that shows the placement of every array",
    )


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    config = config_of(arguments.recipe, arguments.overrides)
    if arguments.html is not None:
        check_writable("--html", arguments.html, files_read(arguments.recipe, arguments.overrides, config))
    explanation = explain(config)
    if arguments.json:
        print(json.dumps(explanation.to_dict(), indent=1))
    elif arguments.html is not None:
        title = f"{arguments.recipe} {' '.join(arguments.overrides)}"
        write_file("--html", arguments.html, explanation.to_html(title=title))
        print(f"{arguments.html}: {len(explanation.findings)} findings")
    else:
        print(explanation.to_text(width=table_width()))
    return FINDINGS if explanation.findings else DONE
