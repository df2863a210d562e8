"""Work spread over processes: the device mesh, tensor and data parallelism, one technique a
file."""
