"""What one GPU shows of this project, in four calls of at most ten minutes each."""
