"""The master's decisions: plain state machines, ``handle(input, now) -> list of commands``.

These machines use no clock, I/O, threads, logging or randomness. So the journal replays to the same state,
the simulator runs on a virtual clock, and tests never wait. Each machine has ``validate()``, which states its
invariants.
"""
