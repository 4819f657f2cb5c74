"""Requests: ours, a user's, and seeded ones; unusable files are refused with file and line."""

import dataclasses
from pathlib import Path

import pytest

from zeromismatch.agent_tools.scenarios import (
    Chat,
    builtin_chats,
    chat_requests,
    check_lengths,
    default_requests,
    load_chats,
    random_requests,
)
from zeromismatch.kernels.errors import UsageError
from zeromismatch.model_recipes.models import LoadedModel
from zeromismatch.trainer.engines.base import Request


class Letters:
    """A tokenizer whose tokens are letters, with and without a chat template."""

    def __init__(self, template: str | None) -> None:
        self.chat_template = template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert add_generation_prompt
        assert not tokenize
        return f"<{messages[0]['content']}>"


def talking(model: LoadedModel, template: str | None = "yes") -> LoadedModel:
    return dataclasses.replace(model, tokenizer=Letters(template))


def test_there_are_enough_varied_builtin_chats() -> None:
    chats = builtin_chats()
    assert len(chats) >= 20
    assert len({chat.prompt for chat in chats}) == len(chats)
    assert all(chat.prompt and chat.reply and (chat.prompt + chat.reply).isascii()
               for chat in chats)  # fmt: skip


def test_replies_are_cut_and_marked_as_sampled(model: LoadedModel) -> None:
    (request,) = chat_requests(talking(model), [Chat("ab", "hello")], max_reply=3)
    assert request.tokens == tuple(map(ord, "<ab>hel"))
    assert request.sampled_mask == (False,) * 4 + (True,) * 3
    assert request.turns == ((4, 7),)


def test_a_tokenizer_without_template_gets_plain_text(model: LoadedModel) -> None:
    (request,) = chat_requests(talking(model, None), [Chat("ab", "")])
    assert request.tokens == (1, ord("a"), ord("b"))
    assert not any(request.sampled_mask)


def test_the_longest_builtin_chats_are_taken_first(model: LoadedModel) -> None:
    requests = default_requests(talking(model), count=5, max_reply=48)
    assert len(requests) == 5
    assert all(sum(request.sampled_mask) == 48 for request in requests)


def test_seeded_requests_repeat_share_a_prefix_and_stay_in_the_vocabulary(
    model: LoadedModel,
) -> None:
    requests = default_requests(model, count=6, seed=4)
    assert requests == random_requests(model, count=6, seed=4)
    assert requests != random_requests(model, count=6, seed=5)
    assert requests[1].tokens[:21] == requests[3].tokens[:21]
    assert requests[0].tokens[:2] != requests[1].tokens[:2]
    assert all(0 <= token < 3011 for request in requests for token in request.tokens)
    assert all(any(request.sampled_mask) for request in requests)


def test_a_prompts_file_may_mix_json_and_plain_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "reply": "b"}\n\nplain text\n{"prompt": "c"}\n')
    assert load_chats(file) == (Chat("a", "b"), Chat("plain text", ""), Chat("c", ""))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "holds no prompt"),
        ("\n \n", "holds no prompt"),
        ('{"prompt": " "}', r":1 has an empty prompt"),
        ('ok\n{"prompt": ', r":2 is not valid JSON"),
        ('{"reply": "x"}', r'needs the text "prompt"'),
        ('{"prompt": 3}', r'needs the text "prompt"'),
        ('{"prompt": "a", "reply": 3}', '"reply" must be text'),
        ('{"prompt": "a", "answer": "b"}', "unknown keys: answer"),
    ],
)
def test_an_unusable_prompts_file_is_refused(
    tmp_path: Path, content: str, complaint: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError, match=complaint):
        load_chats(file)


def test_a_missing_or_binary_prompts_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="check the path"):
        load_chats(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="check the path"):
        load_chats(tmp_path / "binary")


def test_prompts_for_a_model_without_tokenizer_are_refused(
    model: LoadedModel, tmp_path: Path
) -> None:
    (tmp_path / "prompts").write_text("hello\n")
    with pytest.raises(UsageError, match="has no tokenizer"):
        default_requests(model, prompts=tmp_path / "prompts")


def test_an_empty_prompt_and_overlong_requests_are_refused(model: LoadedModel) -> None:
    with pytest.raises(UsageError, match="prompt 0 is empty"):
        chat_requests(talking(model), [Chat("  ", "x")])
    with pytest.raises(UsageError, match="is empty"):
        check_lengths(model, [Request(id="a", tokens=())])
    with pytest.raises(UsageError, match="has 2049 tokens, tiny:llama takes 2048"):
        check_lengths(model, [Request(id="a", tokens=(5,) * 2049)])
