"""Trainer ranks: batches, optimizer steps, checkpoints and scoring."""
