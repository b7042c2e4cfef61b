"""The operator's decisions, and the objects and pods of a job. Pure."""
