"""Networks that nobody here wrote, one of every family of the common libraries, and what magis makes of each."""
