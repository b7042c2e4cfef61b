"""What the ranks of a training decide, without I/O, clock and torch."""
