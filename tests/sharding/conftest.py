"""Brokers, for the tests of streams."""

from tests.brokers import nats_port, rabbitmq_port, redis_port

__all__ = ["nats_port", "rabbitmq_port", "redis_port"]
