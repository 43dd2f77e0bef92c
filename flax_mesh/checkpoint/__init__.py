"""Checkpoints that any layout can restore, and conversion to and from safetensors."""

from flax_mesh.checkpoint.checkpointer import Checkpointer as Checkpointer
from flax_mesh.checkpoint.hf.convert import load_safetensors as load_safetensors
from flax_mesh.checkpoint.hf.convert import save_safetensors as save_safetensors
from flax_mesh.checkpoint.hf.decoders import decoder_config_from_hf as decoder_config_from_hf
from flax_mesh.checkpoint.hf.decoders import huggingface_config as huggingface_config
from flax_mesh.checkpoint.hf.decoders import read_config as read_config
from flax_mesh.checkpoint.hf.mapping import ParamMapping as ParamMapping
from flax_mesh.checkpoint.hf.names import DECODER_NAMES as DECODER_NAMES
from flax_mesh.checkpoint.retention import RetentionPolicy as RetentionPolicy
from flax_mesh.checkpoint.warm_start import RestoreReport as RestoreReport
