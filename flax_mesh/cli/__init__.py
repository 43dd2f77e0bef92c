"""The command line, one file per command: its arguments and its output."""

from flax_mesh.cli.main import main as main
