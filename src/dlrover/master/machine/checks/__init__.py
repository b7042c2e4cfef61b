"""The node check: pairing, evidence and verdict. Pure."""
