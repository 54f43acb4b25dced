"""Losses: policy terms (``policy.py``, ``surrogates.py``, ``trust_region.py``), and what they share (``loss.py``)."""
