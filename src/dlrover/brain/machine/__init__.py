"""The optimizers of single jobs and of the cluster. Pure."""
