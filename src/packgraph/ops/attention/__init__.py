"""Causal attention within packed documents: backends, and rows spread over ranks."""
