"""The adapter for the anthropic SDK (2.x): one Messages request, one reply.

    AnthropicProvider(model="claude-...", key=key)

The SDK retries 408, 409, 429, 5xx and dropped connections with jitter and honours ``retry-after``.
Raw content blocks go back word for word, so that signed thinking stays valid.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .conversation import (
    Call,
    ProviderFault,
    Reply,
    Results,
    Stop,
    Told,
    ToolSpec,
    Turn,
    Usage,
)
from .provider_errors import RETRIES, checked_key, faults, import_sdk

STOPS: Mapping[str, Stop] = {
    "tool_use": "calls",
    "end_turn": "done",
    "stop_sequence": "done",
    "pause_turn": "cut",
    "max_tokens": "cut",
    "model_context_window_exceeded": "cut",
    "refusal": "refused",
}


class AnthropicProvider:
    """See the module. base_url: None for the provider's own."""

    name = "anthropic"

    def __init__(
        self, *, model: str, key: str | None, base_url: str | None = None, retries: int = RETRIES
    ) -> None:
        self.model = model
        self.sdk = import_sdk("anthropic")
        self.client = self.sdk.AsyncAnthropic(
            api_key=checked_key(key, "ANTHROPIC_API_KEY"), base_url=base_url, max_retries=retries
        )

    async def reply(
        self,
        system: str,
        turns: Sequence[Turn],
        tools: Sequence[ToolSpec],
        *,
        max_output: int,
        seconds: float | None,
    ) -> Reply:
        """One request; raises ProviderFault."""
        given = [
            {"name": tool.name, "description": tool.description, "input_schema": tool.schema}
            for tool in tools
        ]
        with faults(self.sdk):
            message = await self.client.messages.create(
                model=self.model,
                max_tokens=max_output,
                system=system,
                messages=messages_of(turns),
                tools=given,
                timeout=seconds or 600.0,
            )
        return reply_of(message)

    async def close(self) -> None:
        """Close the SDK's connections."""
        await self.client.close()


def messages_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Turns in the API's form; neighbours of one role are merged, as the API wants them."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        match turn:
            case Told(text=text):
                role, content = "user", [{"type": "text", "text": text}]
            case Results(results=results):
                role = "user"
                content = [
                    {
                        "type": "tool_result",
                        "tool_use_id": entry.id,
                        "content": entry.text or "(nothing)",
                        "is_error": entry.is_error,
                    }
                    for entry in results
                ]
            case Reply(raw=raw):
                role, content = "assistant", raw or [{"type": "text", "text": "(nothing)"}]
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] = [*messages[-1]["content"], *content]
        else:
            messages.append({"role": role, "content": content})
    return messages


def reply_of(message: Any) -> Reply:
    """The SDK's message as a reply; anything that is no message is ``nonsense``."""
    content, usage = getattr(message, "content", None), getattr(message, "usage", None)
    stop = STOPS.get(getattr(message, "stop_reason", None) or "")
    if not isinstance(content, list) or usage is None or stop is None:
        raise ProviderFault(
            "nonsense", f"the answer is no message ({str(message)[:200]!r}); check --base-url"
        )
    texts: list[str] = []
    calls: list[Call] = []
    for block in content:
        kind = getattr(block, "type", None)
        if kind == "text":
            texts.append(block.text)
        elif kind == "tool_use":
            given = block.input
            calls.append(
                Call(
                    id=block.id,
                    name=block.name,
                    arguments=given if isinstance(given, dict) else None,
                    written="" if isinstance(given, dict) else str(given),
                )
            )
    cut = stop == "cut"  # the last call may be half written
    kept = [block for block in content if not cut or block.type != "tool_use"]
    cached = [getattr(usage, f"cache_{name}_input_tokens", 0) or 0 for name in ("creation", "read")]
    return Reply(
        text="\n".join(texts),
        calls=() if cut else tuple(calls),
        usage=Usage(input=(usage.input_tokens or 0) + sum(cached), output=usage.output_tokens or 0),
        stop="calls" if calls and stop == "done" else stop,
        raw=[block.model_dump(mode="json", exclude_none=True) for block in kept],
    )
