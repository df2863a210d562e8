"""Checkpoints: written, read, and weights alone."""
