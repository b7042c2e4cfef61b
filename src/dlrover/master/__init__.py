"""The master: one process per job, which decides what the job's nodes do.

It never imports a training framework: what it knows of the workers, their agents told it.
"""
