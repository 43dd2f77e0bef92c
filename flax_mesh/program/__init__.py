"""Traced programs (jaxprs): reading them, following values through them, and evaluating them with a rule."""
