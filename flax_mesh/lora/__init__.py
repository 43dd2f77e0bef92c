"""Low-rank adapters (LoRA) of the weights of any model."""

from flax_mesh.lora.adapters import merge_lora as merge_lora
from flax_mesh.lora.add import add_lora as add_lora
from flax_mesh.lora.call import with_lora as with_lora
