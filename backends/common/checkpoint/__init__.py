"""Files of a training checkpoint: data, checksums, partial output, background writing."""
