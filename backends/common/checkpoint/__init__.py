"""Files of a training checkpoint: data, checksums, partial output, writing in the background."""
