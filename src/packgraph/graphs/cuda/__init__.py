"""The CUDA backend: captures, private pools of the allocator, workspaces of cuBLAS, copies beside
captured work."""
