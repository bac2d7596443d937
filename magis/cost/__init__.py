"""What an operator costs: nanoseconds and workspace bytes, from a profile store or a roofline."""
