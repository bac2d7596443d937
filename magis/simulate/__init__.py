"""Peak memory and latency of plans, without running anything."""
