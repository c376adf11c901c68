"""Megatron-Core modules of the GLM-5 family."""
