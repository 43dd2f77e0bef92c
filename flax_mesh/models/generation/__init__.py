"""Text of a decoder: compiled programs, the prompts that they compute, and the function that runs them."""
