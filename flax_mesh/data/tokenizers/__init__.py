"""Tokenizers and chat templates in a separate process, since their files are untrusted."""
