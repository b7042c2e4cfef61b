"""The master: one process per job, which decides what the job's nodes do.

It never imports a training framework: all it knows about the workers comes from their agents.
"""
