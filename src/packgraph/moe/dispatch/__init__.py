"""Dispatchers, which take tokens to the ranks of their experts and back: several with one
protocol."""
