"""How a strategy is applied to a model: one file for each mode."""
