"""What outlives a master: the journal of inputs, and the history of events."""
