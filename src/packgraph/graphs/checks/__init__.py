"""Checks before a capture: what a graph cannot hold, or a replay would not repeat."""
