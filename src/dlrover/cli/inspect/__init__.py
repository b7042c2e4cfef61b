"""Commands that inspect a job: status, events, plans, goodput."""
