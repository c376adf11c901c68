"""Hugging Face checkpoints in and out: names, shapes, shards, FP8 blocks, conversion rules."""
