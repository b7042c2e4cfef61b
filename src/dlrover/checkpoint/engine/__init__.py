"""The part in a worker: saves to memory, and the way to the node's saver."""
