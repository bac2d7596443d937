"""The seed's API: builders of its networks (`nn`), `setup_training_graph` and `run_optimization`."""
