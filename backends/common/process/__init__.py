"""Process groups: rendezvous, agreement on failures, collectives with gradients."""
