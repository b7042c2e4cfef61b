"""Pure decisions about embedding tables."""
