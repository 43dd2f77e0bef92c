"""Masks of attention: bounds of scores, the blocks that are visited, the band of a kernel, padding."""
