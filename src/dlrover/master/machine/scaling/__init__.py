"""The size of a job: wanted numbers, trials and their outcomes. Pure."""
