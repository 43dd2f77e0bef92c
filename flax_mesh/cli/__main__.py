"""`python -m flax_mesh.cli`."""

import sys

from flax_mesh.cli.main import command

sys.exit(command())
