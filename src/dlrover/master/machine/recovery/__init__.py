"""The response to faults: incidents, restart budgets, the ladder of responses, survivors. Pure."""
