"""Commands for clusters: the operator, manifests and the Brain."""
