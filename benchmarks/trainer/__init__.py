"""Compare a trainer's step with Hugging Face's model: speed, utilization, memory. ``python -m benchmarks.trainer``."""
