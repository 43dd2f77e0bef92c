"""Attention in traced programs: the graph of a program, the softmax of each attention, the operations around it."""
