"""Replicas of a model that go on when one of them is lost: membership, groups, repeated steps, healing."""
