"""A learner over several ranks: FSDP2 with a fixed order of every sum."""
