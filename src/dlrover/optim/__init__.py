"""Optimizers, and wrappers that synchronize seldom (EDiT, DiLoCo)."""
