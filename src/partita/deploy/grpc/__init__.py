"""gRPC with mutual TLS: the default transport of `partita deploy`. Clients call; the server never does."""

from partita.deploy.grpc.client import GrpcClient
from partita.deploy.grpc.server import GrpcTransport

__all__ = ["GrpcClient", "GrpcTransport"]
