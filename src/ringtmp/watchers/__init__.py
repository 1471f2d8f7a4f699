"""Watchers that hand a run's numbers to other tools: files, TensorBoard, MLflow, functions of the user's."""
