"""Parallel layouts seen before any GPU is: right or not, how much memory, how fast at best."""
