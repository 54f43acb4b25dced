"""Trainer ranks: batches, optimizer steps, checkpoints, scoring."""
