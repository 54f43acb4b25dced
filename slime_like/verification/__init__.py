"""Comparing parallel layouts: what to run, and how far results may differ. No Ray, no process group."""
