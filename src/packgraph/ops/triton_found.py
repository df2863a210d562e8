"""Availability of Triton: it comes with torch for CUDA, and nowhere else do kernels need it."""

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
