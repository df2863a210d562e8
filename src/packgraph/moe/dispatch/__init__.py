"""Dispatchers that take tokens to the ranks of their experts and back, behind one protocol."""
