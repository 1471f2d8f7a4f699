"""What every strategy stands on: mailboxes, leaders, workers, stages, optimizers, checkpoints, snapshots."""
