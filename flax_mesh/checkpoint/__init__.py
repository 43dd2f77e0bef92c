from flax_mesh.checkpoint.fill import Filled as Filled
from flax_mesh.checkpoint.keep import Keep as Keep
from flax_mesh.checkpoint.manager import Checkpointer as Checkpointer
