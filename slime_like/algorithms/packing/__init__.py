"""Packing of sequences into THD batches: layout, per-token fields, partition over micro-batches, transfer."""
