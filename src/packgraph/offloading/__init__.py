"""Activations that wait on the host between forward and backward: which, when, and how they are
moved."""
