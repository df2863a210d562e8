"""Dynamic context parallelism: which documents share a row on how many ranks, and when."""
