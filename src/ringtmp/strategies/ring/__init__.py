"""The ring: each node holds a run of adjacent layers; activations go clockwise, gradients anticlockwise."""
