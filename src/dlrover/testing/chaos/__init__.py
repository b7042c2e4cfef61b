"""Faults for real processes: inject them into a running job, and take the time until it trains again."""
