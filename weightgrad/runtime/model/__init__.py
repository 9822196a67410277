"""The user's module as elements of the index space: its parameters, gradients, shards and devices."""
