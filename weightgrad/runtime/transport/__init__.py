"""The transport between sites and the global server: whole messages, each once and in the order of its lane."""

import os

# gRPC writes a line for every handshake that fails, and strangers may have millions fail: only if it is asked for. gRPC
# looks when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
