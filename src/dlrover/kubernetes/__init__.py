"""Jobs on Kubernetes: the operator, and the platform that runs a job's nodes as pods."""
