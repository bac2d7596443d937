"""Plans for people who keep their own stack: policies of torch's selective activation checkpointing."""
