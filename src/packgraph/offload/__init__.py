"""Activations that wait on the host between forward and backward, in eager work and in captured graphs."""
