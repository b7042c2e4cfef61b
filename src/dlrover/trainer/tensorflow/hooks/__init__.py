"""Modules of the original; `dlrover.original.names` has the table of them."""
