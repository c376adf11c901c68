"""Absorbed multi-head latent attention over selected keys."""
