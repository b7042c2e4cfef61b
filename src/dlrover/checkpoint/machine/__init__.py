"""The pure part: layouts, identities, policies and intervals, without I/O, clock or thread."""
