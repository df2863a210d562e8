"""What takes tokens to the ranks of their experts and back: one protocol, several dispatchers."""
