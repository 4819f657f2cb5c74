"""From a recipe folder to a branch and the text of a pull request; nothing is ever pushed.

found = make_pr(Path("runs/align-1/recipe"), repository=Path("."), gates=Path("runs/gates"))
found.branch, found.body
"""

from .pr import PullRequest, make_pr

__all__ = ["PullRequest", "make_pr"]
