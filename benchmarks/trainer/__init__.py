"""A trainer's step beside Hugging Face's model: speed, utilisation, memory. ``python -m benchmarks.trainer``."""
