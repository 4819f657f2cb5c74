"""The adapter for the openai SDK (3.x): one Responses request, one reply.

    OpenAIProvider(model="gpt-...", key=key)

Nothing is stored at the provider (``store=False``): the conversation is sent whole, reasoning items
included in their encrypted form. Retries are the SDK's, as in ``anthropic_api.py``.
"""

import json
from collections.abc import Sequence
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


class OpenAIProvider:
    """See the module. base_url: None for the provider's own."""

    name = "openai"

    def __init__(
        self, *, model: str, key: str | None, base_url: str | None = None, retries: int = RETRIES
    ) -> None:
        self.model = model
        self.sdk = import_sdk("openai")
        self.client = self.sdk.AsyncOpenAI(
            api_key=checked_key(key, "OPENAI_API_KEY"), base_url=base_url, max_retries=retries
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
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.schema,
                "strict": False,
            }
            for tool in tools
        ]
        with faults(self.sdk):
            response = await self.client.responses.create(
                model=self.model,
                instructions=system,
                input=items_of(turns),
                tools=given,
                max_output_tokens=max(16, max_output),  # the API's least
                store=False,
                include=["reasoning.encrypted_content"],
                timeout=seconds or 600.0,
            )
        return reply_of(response)

    async def close(self) -> None:
        """Close the SDK's connections."""
        await self.client.close()


def items_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Turns as input items."""
    items: list[dict[str, Any]] = []
    for turn in turns:
        match turn:
            case Told(text=text):
                items.append({"role": "user", "content": text})
            case Results(results=results):
                items += [
                    {
                        "type": "function_call_output",
                        "call_id": entry.id,
                        "output": ("Error: " if entry.is_error else "") + entry.text,
                    }
                    for entry in results
                ]
            case Reply(raw=raw):
                items += raw
    return items


def reply_of(response: Any) -> Reply:
    """The SDK's response as a reply; anything that is no response is ``nonsense``."""
    output, status = getattr(response, "output", None), getattr(response, "status", None)
    if not isinstance(output, list) or status not in ("completed", "incomplete", "failed"):
        raise ProviderFault(
            "nonsense", f"the answer is no response ({str(response)[:200]!r}); check --base-url"
        )
    if status == "failed":
        raise ProviderFault(
            "unreachable", f"the provider failed ({response.error}); resume the run later"
        )
    texts: list[str] = []
    calls: list[Call] = []
    refused = False
    for item in output:
        if item.type == "function_call":
            calls.append(_call(item))
        elif item.type == "message":
            for part in item.content:
                refused |= part.type == "refusal"
                texts.append(part.refusal if part.type == "refusal" else part.text)
    reason = getattr(response.incomplete_details, "reason", None)
    stop: Stop = "calls" if calls else "done"
    if refused or reason == "content_filter":
        stop = "refused"
    elif status == "incomplete":
        stop = "cut"
        calls = []  # the last one may be half written
    usage = response.usage
    return Reply(
        text="\n".join(texts),
        calls=tuple(calls),
        usage=Usage() if usage is None
        else Usage(input=usage.input_tokens or 0, output=usage.output_tokens or 0),
        stop=stop,
        raw=[_item(item) for item in output if calls or item.type != "function_call"],
    )  # fmt: skip


def _item(item: Any) -> dict[str, Any]:
    """An output item as an input item; the API refuses its own ``status`` there."""
    return item.model_dump(mode="json", exclude_none=True, exclude={"status"})


def _call(item: Any) -> Call:
    try:
        arguments = json.loads(item.arguments)
    except (json.JSONDecodeError, TypeError):
        arguments = None
    if not isinstance(arguments, dict):
        return Call(id=item.call_id, name=item.name, arguments=None, written=str(item.arguments))
    return Call(id=item.call_id, name=item.name, arguments=arguments)
