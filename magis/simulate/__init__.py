"""Simulation of plans: peak memory and latency, without running anything."""
