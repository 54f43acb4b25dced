"""Test and measure this project on one GPU, in four calls of at most ten minutes each."""
