"""The auxiliary loss that trains the indexer."""
