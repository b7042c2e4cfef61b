"""Faults for jobs that run: `dlrover chaos`."""
