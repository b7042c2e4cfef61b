"""What a job's master and directory tell: status, events, plans, goodput."""
