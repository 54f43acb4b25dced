"""Speed, memory and quality of the algorithm layer against the plainer forms: ``python -m benchmarks.algorithms``."""
