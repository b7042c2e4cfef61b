"""Commands that inspect machines: doctor, check, and the network of a host."""
