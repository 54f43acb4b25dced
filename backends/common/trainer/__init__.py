"""A trainer rank, whatever computes its model."""
