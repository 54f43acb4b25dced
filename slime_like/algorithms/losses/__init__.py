"""Losses: policy terms by name (``policy.py``), and everything that all losses share (``loss.py``)."""
