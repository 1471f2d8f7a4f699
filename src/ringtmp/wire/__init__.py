"""What travels between nodes: typed messages, tensors as raw bytes, links that deliver each once and in order."""
