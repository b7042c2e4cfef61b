"""Automation of large distributed training: elastic, fault-tolerant, explained.

Importing this package takes milliseconds: it loads neither grpc nor a training framework.
"""

__version__ = "1.0.0rc1"
