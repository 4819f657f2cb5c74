"""Asynchronous REINFORCE Zero: rollouts, learner and publication at the same time."""
