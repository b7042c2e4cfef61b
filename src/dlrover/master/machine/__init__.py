"""The master's decisions: plain state machines, ``handle(input, now) -> list of commands``.

No clock, no I/O, no thread, no logging, no randomness here: the journal replays to the same state, the
simulator runs on a virtual clock, and tests never wait. Each machine has ``validate()``, which states
its invariants.
"""
