"""The agent's decisions: a plain state machine."""
