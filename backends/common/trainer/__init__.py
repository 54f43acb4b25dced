"""A trainer rank, independent of what computes its model."""
