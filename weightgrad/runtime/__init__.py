"""The deployment: real sites and a real global server, connected by gRPC with mutual TLS."""
