"""Models of other libraries in packgraph. Each folder needs its library, an optional extra."""
