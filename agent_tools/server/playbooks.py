"""The playbooks as the server shows them: rendered pages, named after their causes.

playbooks()["batch-variance"].title
"""

from ..playbooks import Page, names, page


def playbooks() -> dict[str, Page]:
    """All playbooks by name; the first is the overview."""
    return {name: page(name) for name in names()}
