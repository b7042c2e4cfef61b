"""Pure part of the optimizers."""
