"""Which row each routed token takes among those of the experts, and moving rows there and back."""
