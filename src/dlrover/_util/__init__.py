"""Small helpers on the standard library and psutil, independent of DLRover's jobs."""
