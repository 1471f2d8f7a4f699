"""The parameter server: servers hold the parameters as keys, workers push gradients and pull parameters."""
