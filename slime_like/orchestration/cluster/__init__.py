"""Ray: session, placement, nodes, calls, health, clean-up of orphaned processes."""
