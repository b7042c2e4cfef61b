"""The Kubernetes API: credentials, client and informer."""
