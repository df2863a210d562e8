"""Static shapes: which ones, for which lengths, at what cost."""
