"""The commands of ``zm``: each reads its arguments, calls one function, and returns an Answer.

Nothing heavy is imported at the top of these modules, so that ``zm --help`` stays quick.
"""
