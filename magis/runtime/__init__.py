"""Running of steps: generated code, eager baselines, measurement."""
