"""Automation of large distributed training: elastic, fault-tolerant, explained.

Importing this package takes milliseconds: it loads neither grpc nor a training framework.
"""

__version__ = "0.8.0.dev0"
