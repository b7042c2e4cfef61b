"""The process that supervises one node's workers: starts them, watches them, reports on them.

It imports no training framework; it talks to the master by messages only.
"""
