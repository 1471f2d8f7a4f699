"""What data-parallel strategies share: every worker has the whole model and gets a share of each batch."""
