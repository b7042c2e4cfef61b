"""Public test kit: simulated agents, and drivers for the state machines."""
