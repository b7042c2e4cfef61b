"""The probes of a node check. PyTorch is optional; without it, fewer components are checked."""
