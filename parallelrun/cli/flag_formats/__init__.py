"""Other runners' settings to a recipe. `sources` reads a file, `table` translates it by the format's YAML table."""
