"""Checkpoints of one layout-free state, and other forms of its parameters."""

from flax_mesh.checkpoint.checkpointer import Checkpointer as Checkpointer
from flax_mesh.checkpoint.checkpointer import arrays_on_disk as arrays_on_disk
from flax_mesh.checkpoint.checksums import find_damage as find_damage
from flax_mesh.checkpoint.diff import differences as differences
from flax_mesh.checkpoint.diff import value_differences as value_differences
from flax_mesh.checkpoint.find import find_step as find_step
from flax_mesh.checkpoint.find import find_steps as find_steps
from flax_mesh.checkpoint.find import find_valid as find_valid
from flax_mesh.checkpoint.hf.convert import ParamMapping as ParamMapping
from flax_mesh.checkpoint.hf.convert import load_safetensors as load_safetensors
from flax_mesh.checkpoint.hf.convert import save_safetensors as save_safetensors
from flax_mesh.checkpoint.hf.decoders import DECODER_NAMES as DECODER_NAMES
from flax_mesh.checkpoint.hf.decoders import decoder_config_from_hf as decoder_config_from_hf
from flax_mesh.checkpoint.hf.decoders import huggingface_config as huggingface_config
from flax_mesh.checkpoint.hf.decoders import read_config as read_config
from flax_mesh.checkpoint.hf.safetensors import open_safetensors as open_safetensors
from flax_mesh.checkpoint.read import read_record as read_record
from flax_mesh.checkpoint.read import read_tree as read_tree
from flax_mesh.checkpoint.read import step_data as step_data
from flax_mesh.checkpoint.retention import RetentionPolicy as RetentionPolicy
from flax_mesh.checkpoint.warm_start import RestoreReport as RestoreReport
