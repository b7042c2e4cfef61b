"""Loading in a worker: choice of step and source, and the transfer of tensors."""
