"""Ray cluster of a run: session, placement, nodes, calls, health, and cleanup of orphaned processes."""
