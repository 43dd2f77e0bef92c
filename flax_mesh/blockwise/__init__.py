"""Attention in blocks, for any traced function: finding it, placing it on a mesh, evaluating it."""
