"""Runs on several nodes: membership, Ray on each node, and the shared exit status."""
