"""From a checkpoint of glm5 to folders that other programs load, each verified by loading it."""
