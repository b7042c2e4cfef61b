"""What runs in the processes of roles: calls between them, queues and weights."""
