"""Hugging Face directories: reading slices, writing, conversion."""
