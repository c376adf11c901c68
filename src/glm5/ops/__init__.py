"""Tensors in, tensors out: no Megatron module, no config object, no process group."""
