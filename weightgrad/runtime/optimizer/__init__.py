"""The user's optimizer: as the other replicas know it, and as the replica that steps here."""
