"""Any model becomes layers, one at a time; a layer becomes data that a node can train without the user's code."""
