"""Parallel strategies: memory and step time of a transformer under a strategy, and the search for the best one."""
