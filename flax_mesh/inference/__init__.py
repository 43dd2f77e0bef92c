"""Trained decoders: opening a checkpoint or a Hugging Face folder, tokenizers, prompts, perplexity."""
