"""The agent: the process that starts, watches and stops one node's workers, and reports on them.

It imports no training framework and talks to the master by messages only.
"""
