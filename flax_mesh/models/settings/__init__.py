"""Settings of a decoder that are texts, and the checks of its switches."""
