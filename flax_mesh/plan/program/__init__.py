"""The operations of a traced step: their shardings, collectives, kernels, memory and costs."""
