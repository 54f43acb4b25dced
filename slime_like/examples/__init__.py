"""Examples that ship with the package: a tiny model with its data, and a calculator environment."""
