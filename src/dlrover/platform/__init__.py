"""The platforms that create a job's nodes and report what happens to them."""
