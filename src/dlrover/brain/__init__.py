"""The Brain: keeps what jobs have measured, and plans their resources from it. Needs the extra ``brain``."""
