"""All-reduce: every node has the whole model and ends every step with the same sum of gradients."""
