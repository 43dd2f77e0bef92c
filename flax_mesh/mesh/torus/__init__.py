"""The torus of a slice: coordinates and wrap-around links, the assignment of mesh axes, rings."""
