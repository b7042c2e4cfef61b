"""DLRover makes large distributed training automatic: elastic, fault-tolerant, explained.

Importing this package costs milliseconds: it loads neither grpc nor a training framework.
"""

__version__ = "0.8.0.dev0"
