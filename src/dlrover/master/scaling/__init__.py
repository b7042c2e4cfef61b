"""The auto-scaler's shell, its planners, and the master's side of the Brain."""
