"""Process groups, and Megatron-Core on machines without a GPU."""
