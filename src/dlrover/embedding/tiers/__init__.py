"""Tables whose rows lie in memory and on disk."""
