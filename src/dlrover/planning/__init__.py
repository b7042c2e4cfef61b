"""Models that predict what a job will do. Pure: numbers in, numbers out."""
