"""The platform of a master that runs in a cluster: nodes as pods."""
