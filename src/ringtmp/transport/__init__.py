"""Moving packets between nodes. One small interface, several implementations, faults as wrappers."""
