"""Planner: from one request (a step and a limit) to one verified plan."""
