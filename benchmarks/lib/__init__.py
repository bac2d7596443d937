"""What only benchmarks use: other planners, published figures, pictures of both."""
