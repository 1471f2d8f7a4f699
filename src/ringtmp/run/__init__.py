"""One run: build or resume, plan, train, heal, save."""
