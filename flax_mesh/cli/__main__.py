"""`python -m flax_mesh.cli`."""

import sys

from flax_mesh.cli.main import main

sys.exit(main())
