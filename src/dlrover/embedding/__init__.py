"""Hash embeddings that grow, filter, expire and spill, for any framework."""
