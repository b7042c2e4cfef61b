"""Offline tools for stored steps: list, verify, convert, delete."""
