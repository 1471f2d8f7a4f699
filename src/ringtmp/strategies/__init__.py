"""Ways to train, one file per published method."""
