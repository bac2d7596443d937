"""The peak of a training step, and each known remedy with its bytes and its time."""
