"""What of a patch waits for a person, and the ticks that it is tried with.

    reviews.ask(brought, verdict)     # ticked: into the commit; else for the trial
    reviews.ask_for_code(paths)       # code of the project itself: always a person's
    reviews.forget()                  # the trial is over
    reviews.waiting                   # contracts and files that nobody has ticked

Gates refuse a recipe whose contracts are not ticked, so the trial writes a tick of its own into the
worktree; it is gone before anything is committed.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...model_recipes import ticks
from ..verify import Verification
from .kernels import Brought
from .repository import Repository


@dataclass(slots=True, kw_only=True)
class Reviews:
    """See the module. reviewed: contract ids and files that the person who started this accepts."""

    repo: Repository
    tree: Path
    reviewed: Collection[str]
    told: list[str] = field(default_factory=list[str])
    waiting: list[str] = field(default_factory=list[str])
    before: dict[Path, tuple[ticks.Tick, ...]] = field(
        default_factory=dict[Path, tuple[ticks.Tick, ...]]
    )

    def ask(self, brought: Brought, verdict: Verification) -> None:
        """Take in a verdict that needs a person."""
        folder = self.tree / brought.folder
        held = ticks.read_ticks(folder)
        made = ticks.Tick(contract=brought.contract, digest=verdict.digest)
        if brought.contract in self.reviewed:
            ticks.write_ticks(folder, (*held, made))
            self.repo.add(self.tree, str(brought.folder / ticks.FILE))
            return
        self.told += verdict.needs_review
        self.waiting.append(brought.contract)
        if verdict.new_contract:
            self.before.setdefault(folder, held)
            ticks.write_ticks(folder, (*held, made))

    def ask_for_code(self, paths: Sequence[str]) -> None:
        """Take in files of the project itself: they run inside the sweep and the gates that judge
        them, whose word is therefore not enough."""
        self.told += [f"{path} is the project's own code, and judges itself" for path in paths]
        self.waiting += [path for path in paths if path not in self.reviewed]

    def forget(self) -> None:
        """Take the trial's own ticks back."""
        for folder, held in self.before.items():
            if held:
                ticks.write_ticks(folder, held)
            else:
                (folder / ticks.FILE).unlink()
