"""Modules of the original; `dlrover.original.names` has the table of them."""

from dlrover.original.absent import refuse

refuse(__name__)
