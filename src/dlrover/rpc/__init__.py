"""How processes talk: typed messages, one server, one client. The only home of grpc."""

from dlrover import config

config.prepare_for_grpc()
