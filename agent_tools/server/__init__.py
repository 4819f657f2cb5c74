"""The MCP server: the functions of ``zm``, for an agent.

A skin and no more. Each tool is a line of ``jobs/operations.py`` that points at the function which
the command of that name runs; its arguments, their help and its answer are the command's own. The
tools of that list run as jobs, in processes of their own, so this process never imports torch,
answers while they work, and can be killed without losing one.

    build.py       the server, and what happens between a request and an answer
    tools.py       from an operation to a tool; job_start and job_status
    confine.py     which paths an agent may name
    resources.py   runs, reports, traces, playbooks, logs, to read page by page
    http.py        loopback HTTP: token, Host and Origin
    schemas.py     the schemas of all answers, kept in schemas.json

    zm serve
"""
