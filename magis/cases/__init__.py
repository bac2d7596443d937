"""Execution of one case of the gate: capture, plan, run, compare with eager, report figures."""
