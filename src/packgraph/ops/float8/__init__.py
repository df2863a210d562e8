"""Products of linear layers in float8."""
