"""Attention of any traced function, in kernels and in blocks: finding it, placing it on a mesh, computing it."""
