"""Compares a glm5 model with `transformers`, number by number."""
