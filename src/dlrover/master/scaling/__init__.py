"""The auto-scaler's shell, and the master's side of the Brain."""
