"""Memory of graphs before they are captured, and budgets for it."""
