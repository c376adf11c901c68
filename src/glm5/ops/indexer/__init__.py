"""The lightning indexer: index scores and the selection of keys."""
