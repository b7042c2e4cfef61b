"""An endpoint where other systems push records that a training reads: Flink, Spark, Ray, or anything with HTTP.

A process of its own, ``dlrover ingest``, and no part of a job's master: records are many bytes, they have to
be on a disk before they are answered for, and producers come before a job and stay after it.
"""
