"""Examples that ship with the package: a tiny model, arithmetic, a calculator environment."""
