"""Work on raw memory: a compiled library without Python's or a framework's ABI, and a twin of it in Python."""
