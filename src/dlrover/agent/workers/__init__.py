"""The workers of a node: started from a zygote, watched, and stopped without leftovers."""
