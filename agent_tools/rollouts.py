"""Reading runs: which tokens were sampled, with which logprob bits, and by which kinds of steps.

    compare_tokens(rollout, trainer)      ->  TokenCount(compared=768, differing=0, ...)
    batching_facts(rollout.executed, ...) ->  BatchingFacts(mixed_steps=31, hits=15, ...)

Only bits are compared here; a count of zero is never equality. ``zm align`` exercises it.
"""

import hashlib
import struct
from collections.abc import Sequence

from ..kernels.attention import PAGE
from ..kernels.errors import InconclusiveError, MisalignedError
from ..trainer.engines.base import Hit, Preempt, Request, Run, Schedule, Step
from .records import Record

Token = tuple[str, int]


class TokenCount(Record):
    """Sampled tokens with a logprob in both runs, and how many of them differ in bits."""

    compared: int
    differing: int
    first: tuple[str, int] | None = None

    @property
    def equal(self) -> bool:
        """At least one token compared and none differs."""
        return self.compared > 0 and self.differing == 0


class BatchingFacts(Record):
    """What an executed schedule really contained: the preconditions of a claim."""

    steps: int
    mixed_steps: int
    """Steps in which prompt rows and decode rows shared one forward pass."""
    chunked_prompts: int
    """Requests whose prompt went through more than one step."""
    hits: int
    preemptions: int
    shortest: int
    """Tokens of the shortest request."""
    tiles: int
    """KV tiles (pages) that the shortest request crosses."""

    def missing(self, *, tiles: int = 3) -> list[str]:
        """Which preconditions of the mixed-rollout claim did not occur."""
        absent = {
            "no step mixed prompt and decode rows": self.mixed_steps == 0,
            "no prompt was chunked": self.chunked_prompts == 0,
            "no prefix hit occurred": self.hits == 0,
            f"the shortest request crosses fewer than {tiles} KV tiles": self.tiles < tiles,
        }
        return [reason for reason, applies in absent.items() if applies]


def logprob_bits(run: Run) -> dict[Token, int]:
    """Logprob bits (int32) of every sampled token of a run."""
    sampled = {
        (request.id, position)
        for request in run.requests
        for position, chosen in enumerate(request.sampled_mask)
        if chosen
    }
    return {
        (sample.request, sample.position): sample.logprob_bits
        for sample in run.samples
        if (sample.request, sample.position) in sampled
    }


def logprob_values(run: Run) -> dict[Token, float]:
    """The same logprobs as numbers."""
    return {
        token: struct.unpack("<f", struct.pack("<i", bits))[0]
        for token, bits in logprob_bits(run).items()
    }


def logprob_digest(run: Run) -> str:
    """One digest over every sampled token's request, position and logprob bits."""
    hasher = hashlib.blake2b(digest_size=16)
    for (request, position), bits in sorted(logprob_bits(run).items()):
        hasher.update(f"{request}\0{position}\0{bits}\n".encode())
    return hasher.hexdigest()


def compare_tokens(left: Run, right: Run) -> TokenCount:
    """Compare the bits of every sampled token; both runs must have scored the same ones."""
    ours, theirs = logprob_bits(left), logprob_bits(right)
    tokens = {request.id: request.tokens for request in right.requests}
    for request in left.requests:
        if tokens.get(request.id) != request.tokens:
            raise MisalignedError(
                f"request {request.id} has other tokens in the two runs; "
                "score the rollout's own tokens"
            )
    if ours.keys() != theirs.keys():
        odd = min(ours.keys() ^ theirs.keys())
        raise InconclusiveError(
            f"token {odd[1]} of request {odd[0]} was scored in one run only; score both runs whole"
        )
    differing = sorted(token for token, bits in ours.items() if theirs[token] != bits)
    return TokenCount(
        compared=len(ours), differing=len(differing), first=differing[0] if differing else None
    )


def steps_of(executed: Schedule) -> list[Step]:
    """The forward passes of a schedule."""
    return [event for event in executed.events if isinstance(event, Step)]


def batching_facts(executed: Schedule, requests: Sequence[Request]) -> BatchingFacts:
    """Count what the executed schedule contains. Prompts end at the first sampled token."""
    prompts = {
        request.id: request.sampled_mask.index(True)
        if True in request.sampled_mask
        else len(request.tokens)
        for request in requests
    }
    steps = steps_of(executed)
    pieces: dict[str, int] = {}
    mixed = 0
    for step in steps:
        in_prompt = [piece.start < prompts[piece.request] for piece in step.slices]
        mixed += any(in_prompt) and not all(in_prompt)
        for piece, inside in zip(step.slices, in_prompt, strict=True):
            pieces[piece.request] = pieces.get(piece.request, 0) + inside
    shortest = min((len(request.tokens) for request in requests), default=0)
    return BatchingFacts(
        steps=len(steps),
        mixed_steps=mixed,
        chunked_prompts=sum(count > 1 for count in pieces.values()),
        hits=sum(isinstance(event, Hit) for event in executed.events),
        preemptions=sum(isinstance(event, Preempt) for event in executed.events),
        shortest=shortest,
        tiles=(shortest + PAGE - 1) // PAGE,
    )
