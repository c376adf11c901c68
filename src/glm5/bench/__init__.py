"""Times of the kernels beside those of other implementations, in one process."""
