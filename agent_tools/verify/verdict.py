"""From findings to one verdict, and the digests of all that judges.

    status, reason = conclude(violations, controls, (bits, accuracy, gradient, speed))

Green needs every question answered and every control red; anything less is void, never green.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from ...kernels import certificates
from ...kernels.contract import Contract
from .records import (
    AccuracyAnswer,
    BitsAnswer,
    Control,
    GradientAnswer,
    SpeedAnswer,
    VerificationStatus,
    Violation,
)

Answer = BitsAnswer | AccuracyAnswer | GradientAnswer | SpeedAnswer


def conclude(
    violations: Sequence[Violation], controls: Sequence[Control], questions: Sequence[Answer]
) -> tuple[VerificationStatus, str]:
    """The status and its reason in one sentence."""
    if violations:
        found = violations[0]
        where = f" ({found.where})" if found.where else ""
        return "fail", f"breaks rule {found.rule}{where}: {found.detail}"
    green = [each for each in controls if not each.red]
    if green:
        return "void", f"control {green[0].name!r} is not red: {green[0].detail}"
    unanswered = [each for each in questions if each.status == "not-run"]
    if unanswered or not controls:
        detail = next((each.detail for each in unanswered if each.detail), "a question is open")
        return "void", f"{detail}; run it again on an idle machine"
    names = ("bits", "accuracy", "gradient", "speed")
    asked = [
        name for name, each in zip(names, questions, strict=True) if each.status != "not-applicable"
    ]
    return "pass", f"green: {', '.join(asked)}; every control was red"


def _shared(here: Path) -> list[Path]:
    """What loading a recipe's kernel shares with judging it."""
    recipes = here.parents[1] / "model_recipes"
    return [recipes / "candidate.py", recipes / "native.py"]


def digests(contract: Contract) -> dict[str, str]:
    """Of all that judges: a report with other digests was judged by something else."""
    here = Path(__file__).resolve().parent
    kernels = here.parents[1] / "kernels"
    parts = {
        "verifier": [*sorted(here.glob("*.py")), kernels / "entry_points.py", *_shared(here)],
        "comparer": [kernels / "bits.py"],
        "references": sorted((kernels / "reference").glob("*.py")),
        "cases": [*sorted(kernels.glob("cases*.py")), kernels / "trial.py"],
    }
    found = {
        name: hashlib.blake2b(b"".join(p.read_bytes() for p in paths), digest_size=16).hexdigest()
        for name, paths in parts.items()
    }
    found["contract"] = hashlib.blake2b(repr(contract).encode(), digest_size=16).hexdigest()
    if contract.device == "cpu":
        found["core"] = certificates.library_digest()
    return found
