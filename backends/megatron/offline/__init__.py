"""Conversion of whole checkpoints from disk to disk: no device, no running ranks, memory for a few tensors."""
