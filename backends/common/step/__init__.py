"""One optimizer step: packs, objective, balance, sums, learning rate."""
