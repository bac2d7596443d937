"""A user's own training loop, with a step that needs less memory: `magis.optimize`."""
