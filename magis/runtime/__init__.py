"""Running steps for real: generated code, eager baselines, measurement."""
