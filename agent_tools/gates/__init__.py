"""Gates C0 to C10: is this model, under this plan, on these engines, aligned?

    report = run_gates(load_model("smollm2-135m"), "aligned")
    report.status, report.failed

The wording of the gates is this project's own (public write-ups name C0 to C10 and no more). One
file per group of gates; ``base.py`` has the records and the rules, ``run.py`` runs them. What makes
a gate worth something: it counts what it compared, proves from the executed schedule that the thing
it talks about happened, and turns red on a planted fault in the same run.

    zm gate smollm2-135m --plan aligned
"""

from .base import GateReport, GateResult, verify
from .run import GATES, Regression, read_gates, rerun, run_gates

__all__ = [
    "GATES",
    "GateReport",
    "GateResult",
    "Regression",
    "read_gates",
    "rerun",
    "run_gates",
    "verify",
]
