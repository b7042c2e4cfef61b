"""Pure decisions about roles: no I/O, clock, thread or randomness."""
