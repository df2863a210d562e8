"""Configuration of a run: sections, values, files and command line."""
