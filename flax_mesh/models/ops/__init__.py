"""Functions of arrays that the layers of a decoder consist of."""
