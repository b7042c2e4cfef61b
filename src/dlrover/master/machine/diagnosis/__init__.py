"""Diagnosis of failures: facts, causes and advice. Pure."""
