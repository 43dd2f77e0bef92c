from flax_mesh.checkpoint.manager import Checkpointer as Checkpointer
