"""The coordinator process of a job of several roles: it starts the roles' jobs, watches them and ends with them."""
