"""Brokers, for the tests of streams."""

from tests.brokers import kafka_port, nats_port, pulsar_port, rabbitmq_port, redis_port

__all__ = ["kafka_port", "nats_port", "pulsar_port", "rabbitmq_port", "redis_port"]
