"""The same work done by others: torch's own ways to train on several processes, and one process alone."""
