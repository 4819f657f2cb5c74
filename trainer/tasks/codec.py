"""Text to tokens and back, for tasks that are written in text. Training itself sees only tokens.

A prompt is encoded once, what a task says between turns is encoded alone and appended, and sampled
tokens stay the ids that were sampled: nothing is ever decoded and encoded again. Text that the
model wrote is decoded for the reward and for nothing else.

    codec_of(load_model("tiny:qwen3")).prompt("2 + 3?")        # bytes, since it has no tokenizer
"""

from dataclasses import dataclass
from typing import Any, Protocol

from ...kernels.errors import CapabilityError
from ...model_recipes.models import LoadedModel

BYTES = 256
FIRST_BYTE = 3
END = 2
UNREADABLE = "\N{REPLACEMENT CHARACTER}"


class Codec(Protocol):
    """See the module. Codecs pickle: workers may be other processes."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a model turn."""
        ...

    def prompt(self, question: str, system: str = "") -> tuple[int, ...]:
        """A question, up to where the model begins to answer."""
        ...

    def reply(self, text: str, *, stopped: bool) -> tuple[int, ...]:
        """What is said to the model after one of its turns, up to where its next one begins.

        stopped: whether the turn ended with a stop token, which then is not added again.
        """
        ...

    def decode(self, tokens: tuple[int, ...]) -> str:
        """The text of sampled tokens; special ones are left out."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteCodec:
    """UTF-8 bytes as ids 3 to 258, for models without a tokenizer: 0 pads, 1 begins, 2 ends.

    Ids outside that range decode to a replacement character.
    """

    begin: int = 1

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """2."""
        return (END,)

    def prompt(self, question: str, system: str = "") -> tuple[int, ...]:
        """System text and question, a line each."""
        lines = [part for part in (system, question) if part]
        return (self.begin, *_bytes("\n".join(lines) + "\n"))

    def reply(self, text: str, *, stopped: bool) -> tuple[int, ...]:
        """The text on lines of its own."""
        return (*(() if stopped else (END,)), *_bytes(f"\n{text}\n"))

    def decode(self, tokens: tuple[int, ...]) -> str:
        """UTF-8, what is no text replaced."""
        runs: list[str] = []
        held = bytearray()
        for token in tokens:
            if FIRST_BYTE <= token < FIRST_BYTE + BYTES:
                held.append(token - FIRST_BYTE)
            elif token != END:
                runs += [held.decode(errors="replace"), UNREADABLE]
                held = bytearray()
        return "".join([*runs, held.decode(errors="replace")])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCodec:
    """A transformers tokenizer with its chat template, or plain lines where it has none."""

    tokenizer: Any

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokenizer's end of sequence."""
        end = self.tokenizer.eos_token_id
        return () if end is None else (int(end),)

    def prompt(self, question: str, system: str = "") -> tuple[int, ...]:
        """A user message (after a system message), up to the assistant's turn."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        return self._encode(self._template(messages))

    def reply(self, text: str, *, stopped: bool) -> tuple[int, ...]:
        """A user message after an assistant's turn."""
        mark = "\x00turn\x00"
        messages = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": mark},
            {"role": "user", "content": text},
        ]
        tail = self._template(messages).partition(mark)[2]
        tokens = self._encode(tail)
        return tokens[1:] if stopped and tokens[:1] == self.stop_ids[:1] else tokens

    def decode(self, tokens: tuple[int, ...]) -> str:
        """Text without special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _template(self, messages: list[dict[str, str]]) -> str:
        if not self.tokenizer.chat_template:
            return "\n".join(message["content"] for message in messages) + "\n"
        return str(
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


def codec_of(model: LoadedModel) -> Codec:
    """The model's own tokenizer, or bytes where it has none and room for them."""
    if model.tokenizer is not None:
        return ChatCodec(tokenizer=model.tokenizer)
    if model.config.vocab_size < FIRST_BYTE + BYTES:
        raise CapabilityError(
            f"{model.spec} has no tokenizer and {model.config.vocab_size} tokens, fewer than the "
            f"{FIRST_BYTE + BYTES} that bytes need; use a task in tokens, such as `even`"
        )
    return ByteCodec()


def _bytes(text: str) -> tuple[int, ...]:
    return tuple(FIRST_BYTE + value for value in text.encode())
