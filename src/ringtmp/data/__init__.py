"""Data lives on the master alone: sources give samples, batches gives the batch of a step."""
