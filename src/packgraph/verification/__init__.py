"""Bitwise comparison of eager and graph runs: `packgraph verify`."""
