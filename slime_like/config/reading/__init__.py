"""Reading a configuration: YAML, flags, problems, help and the generated reference."""
