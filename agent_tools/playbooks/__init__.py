"""The playbooks: what to do about each cause, with this build's values filled in.

    render("batch-variance")     # the page as ``zm playbook batch-variance`` prints it

The pages are files in ``playbooks/``, written once: ``zm playbook``, the MCP prompts and resources,
and the copies in the skill all come from :func:`render`.
"""

from .pages import OVERVIEW, Page, names, page, render

__all__ = ["OVERVIEW", "Page", "names", "page", "render"]
