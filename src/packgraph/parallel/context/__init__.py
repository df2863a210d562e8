"""Context parallelism: rows of tokens over ranks, and plans of which documents share a row on how
many ranks."""
