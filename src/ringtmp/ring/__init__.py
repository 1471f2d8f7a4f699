"""The ring: stages that compute, nodes that act on their neighbours' messages, the master that owns data and loss."""
