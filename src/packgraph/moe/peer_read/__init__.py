"""Rows that ranks read from memory of each other, with no host in between."""
