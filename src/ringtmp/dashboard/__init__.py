"""The live page: follows run directories and shows them in browsers. It reads events and never touches a run's process."""
