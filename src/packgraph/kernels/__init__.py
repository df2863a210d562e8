"""Kernels of other libraries that several packages launch."""
