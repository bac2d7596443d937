"""Processes that run ranks together: started, told what to do, and cleared away."""
