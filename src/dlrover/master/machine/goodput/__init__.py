"""The ledger: the cause of every microsecond of a job. Pure."""
