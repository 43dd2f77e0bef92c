"""Arrays that a function makes, initialized by one program per kind of array."""
