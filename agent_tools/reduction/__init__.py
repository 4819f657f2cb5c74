"""From a culprit to a few numbers: capture the operator's call, write it as a program, shrink it.

``capture.py`` takes the exact inputs of one culprit from both sides, ``programs.py`` says in a line
of Python what each side computed, ``case.py`` holds both as one thing that can be tried, and
``shrink.py`` makes it smaller while it still differs. ``agent_tools/repro.py`` is the flow.
"""
