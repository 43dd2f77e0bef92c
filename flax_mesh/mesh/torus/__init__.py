"""The torus of a TPU slice: coordinates and wraparound links, assignment of mesh axes to physical axes, ring orders."""
