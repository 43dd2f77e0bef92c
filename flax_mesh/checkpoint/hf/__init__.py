"""Hugging Face's format: safetensors, tables of names, configurations of decoders."""
