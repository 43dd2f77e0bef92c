"""The command line: a file for each command, which parses its arguments and prints its answer."""

from flax_mesh.cli.main import main as main
