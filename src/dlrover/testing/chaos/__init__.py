"""Faults for real processes: inject them into a running job, and time its return to training."""
