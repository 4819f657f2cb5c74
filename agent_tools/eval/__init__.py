"""The bench of day-0 tasks: reduced models with code of their own, scored by gates.

    scores = [score(task, solution) for task in tasks()]

``zm eval agent`` runs a driver on them. Tasks are data (``tasks/*.yaml``: config and modelling code
as a hub would give them); reference solutions are not part of this package.
"""
