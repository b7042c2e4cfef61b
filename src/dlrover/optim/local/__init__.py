"""Local SGD: replicas that train on their own and synchronize seldom."""
