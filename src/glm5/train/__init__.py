"""Training: run files, data, packing, metrics and the loop."""
