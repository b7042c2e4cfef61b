"""Jobs on Kubernetes: the operator, and the platform that makes a job's nodes pods."""
