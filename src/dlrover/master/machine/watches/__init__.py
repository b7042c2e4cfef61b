"""Watches over a round: hangs, slow ranks, speed, memory and servers. Pure."""
