"""glm5 inside other people's stacks."""
