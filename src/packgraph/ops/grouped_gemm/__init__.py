"""Products of rows with the matrix of their expert: operations, kernels, and which kernel when."""
