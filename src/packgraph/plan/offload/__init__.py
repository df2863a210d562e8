"""Activations that wait on the host: which groups move, and when they come back."""
