"""The process group, as in ATorch."""
