"""Small helpers on the standard library and psutil; nothing here knows what a job is."""
