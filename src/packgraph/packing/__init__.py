"""Documents → capacity-shaped batches. Boundaries stay host ints; one pinned upload per
microbatch."""
