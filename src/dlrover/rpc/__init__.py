"""Communication between processes: typed messages, a server and clients. Only this package uses grpc."""

from dlrover import config

config.prepare_for_grpc()
