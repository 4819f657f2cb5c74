"""Requests to run a model on: real chats, a user's file, or seeded tokens.

A request is a prompt and its reply, already known token for token, so that two engines score the
same thing; the reply's tokens are marked as sampled. Models with a chat template get real chats
(the ones in ``prompts.json``, written for this project, or a user's file); ``tiny:`` models, which
have no tokenizer, get seeded random tokens, some of which share a prefix.

    requests = default_requests(load_model("smollm2-135m"), count=16, max_reply=48)
    requests = default_requests(model, prompts=Path("my.jsonl"))

A prompts file holds one chat a line: ``{"prompt": "...", "reply": "..."}``, or plain text, which
is a prompt without a reply. Left out: sampling replies (``paged`` does that: ``generate``).
"""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..kernels.attention import PAGE
from ..kernels.errors import UsageError
from ..model_recipes.models import LoadedModel
from ..model_recipes.recurrent import recurrent_chunks
from ..trainer.engines.base import Request, Sampling

SHARED_PREFIX = 21
"""Leading tokens that every second random request shares: more than one KV page of 16. Models with
recurrent layers share as many more than a chunk."""


class Chat(NamedTuple):
    """One prompt, and the reply to score (empty: nothing is scored yet)."""

    prompt: str
    reply: str


def default_requests(
    model: LoadedModel,
    *,
    count: int = 16,
    max_reply: int = 48,
    seed: int = 0,
    prompts: Path | None = None,
) -> tuple[Request, ...]:
    """Requests for ``model``: chats where it has a tokenizer, else seeded random tokens.

    prompts: a user's file; all its chats are taken, in place of ours.
    """
    if prompts is not None:
        chats = load_chats(prompts)
        if model.tokenizer is None:
            raise UsageError(
                f"{model.spec} has no tokenizer, so {prompts} cannot be used; leave out --prompts"
            )
        return chat_requests(model, chats, max_reply=max_reply, seed=seed)
    if model.tokenizer is None:
        return random_requests(model, count=count, max_reply=max_reply, seed=seed)
    chats = builtin_chats()
    chosen = sorted(chats, key=lambda chat: -len(chat.reply))[:count]
    return chat_requests(model, [c for c in chats if c in chosen], max_reply=max_reply, seed=seed)


def builtin_chats() -> tuple[Chat, ...]:
    """The chats in ``prompts.json``."""
    text = (Path(__file__).parent / "prompts.json").read_text(encoding="ascii")
    return tuple(Chat(entry["prompt"], entry["reply"]) for entry in json.loads(text))


def load_chats(path: Path) -> tuple[Chat, ...]:
    """Read a prompts file; UsageError names file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read prompts from {path}: {error}; check the path") from error
    chats = tuple(
        _parse_line(line.strip(), f"{path}:{number}")
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip()
    )
    if not chats:
        raise UsageError(f"{path} holds no prompt; write one prompt a line")
    return chats


def _parse_line(line: str, where: str) -> Chat:
    if not line.startswith("{"):
        return Chat(line, "")
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(
            f'{where} is not valid JSON ({error.msg}); write {{"prompt": "...", "reply": "..."}}'
        ) from error
    known = {"prompt", "reply"}
    if not isinstance(entry.get("prompt"), str) or not isinstance(entry.get("reply", ""), str):
        raise UsageError(f'{where} needs the text "prompt", and "reply" must be text if given')
    if set(entry) - known:
        odd = ", ".join(sorted(set(entry) - known))
        raise UsageError(f'{where} has unknown keys: {odd}; only "prompt" and "reply" are read')
    if not entry["prompt"].strip():
        raise UsageError(f"{where} has an empty prompt; write something to ask or remove the line")
    return Chat(entry["prompt"], entry.get("reply", ""))


def chat_requests(
    model: LoadedModel, chats: Sequence[Chat], *, max_reply: int = 48, seed: int = 0
) -> tuple[Request, ...]:
    """Render chats with the tokenizer's chat template (plain text where it has none).

    The reply is cut to ``max_reply`` tokens, all of which count as sampled.
    """
    requests = []
    for index, chat in enumerate(chats):
        if not chat.prompt.strip():
            raise UsageError(f"prompt {index} is empty; write something to ask")
        prompt = _prompt_tokens(model.tokenizer, chat.prompt)
        reply = model.tokenizer.encode(chat.reply, add_special_tokens=False)[:max_reply]
        requests.append(_request(f"chat-{index:02d}", prompt, reply, max_reply, seed + index))
    return tuple(check_lengths(model, requests))


def random_requests(
    model: LoadedModel, *, count: int = 16, max_reply: int = 48, seed: int = 0
) -> tuple[Request, ...]:
    """Seeded random tokens: prompts of 17 to 60 tokens, so that most requests cross three KV pages.

    Every second request begins with the same tokens, so that prefix hits exist. Where recurrent
    layers have larger chunks, all prompts reach into the third, and two of three to near its end,
    so that replies need a further page while others run.
    """
    rng = random.Random(seed)
    vocabulary = int(model.config.vocab_size)
    cut = math.lcm(PAGE, *recurrent_chunks(model.module))
    prefix = SHARED_PREFIX if cut == PAGE else cut + SHARED_PREFIX - PAGE
    shortest, longest = (17, 61) if cut == PAGE else (2 * cut + 1, 3 * cut)
    near = shortest if cut == PAGE else longest - PAGE + 1
    shared = [rng.randrange(3, vocabulary) for _ in range(prefix)]
    requests = []
    for index in range(count):
        prompt = list(shared) if index % 2 else []
        length = rng.randrange(shortest if index % 3 == 2 else near, longest)
        prompt += [rng.randrange(3, vocabulary) for _ in range(max(1, length - len(prompt)))]
        reply = [rng.randrange(3, vocabulary) for _ in range(rng.randrange(1, max_reply + 1))]
        requests.append(_request(f"random-{index:02d}", prompt, reply, max_reply, seed + index))
    return tuple(check_lengths(model, requests))


def check_lengths(model: LoadedModel, requests: Sequence[Request]) -> Sequence[Request]:
    """UsageError naming the first request that is empty or longer than the model allows."""
    longest = getattr(model.config, "max_position_embeddings", None)
    for request in requests:
        if not request.tokens:
            raise UsageError(f"request {request.id} is empty; give it at least one token")
        if longest is not None and len(request.tokens) > longest:
            raise UsageError(
                f"request {request.id} has {len(request.tokens)} tokens, {model.spec} takes "
                f"{longest}; shorten the prompt"
            )
    return requests


def _prompt_tokens(tokenizer: Any, prompt: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode(prompt)
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def _request(
    name: str, prompt: Sequence[int], reply: Sequence[int], max_reply: int, seed: int
) -> Request:
    start, stop = len(prompt), len(prompt) + len(reply)
    return Request(
        id=name,
        tokens=(*prompt, *reply),
        sampled_mask=(False,) * start + (True,) * len(reply),
        turns=((start, stop),) if reply else (),
        sampling=Sampling(temperature=1.0, seed=seed, max_new_tokens=max_reply),
    )
