"""The field: real sites and a real global server, joined by gRPC with mutual TLS."""
