"""Benchmarks: ways of running the same packed documents, timed side by side in one process."""
