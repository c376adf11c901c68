"""Low-rank adapters on the modules of glm5.model."""
