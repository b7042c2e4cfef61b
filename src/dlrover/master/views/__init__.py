"""What others see of a job: status, metrics and spans."""
