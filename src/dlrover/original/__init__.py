"""The original's names on this package's code; ``dlrover.trainer`` and ``dlrover.python`` have them where they were.

Programs of today use the doors that docs/from-dlrover.md names for each.
"""
