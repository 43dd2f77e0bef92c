"""Hugging Face's format: safetensors, tables of names, configurations of decoders."""

from flax_mesh.checkpoint.hf.hub import DATASET as DATASET
from flax_mesh.checkpoint.hf.hub import commit_of as commit_of
from flax_mesh.checkpoint.hf.hub import model_folder as model_folder
from flax_mesh.checkpoint.hf.hub import with_commit as with_commit
