"""What both SDKs have in common: the import, the key, and what their errors mean here.

The two SDKs name their errors alike, so one table serves both. A fault becomes the run's exit
reason; nothing was changed by then, since a model that does not answer calls no tool.
"""

import contextlib
import importlib
from collections.abc import Generator
from typing import Any

from ...kernels.errors import CapabilityError
from .conversation import ProviderFault

RETRIES = 4
"""Of one request, by the SDK, before a fault is final."""


def import_sdk(name: str) -> Any:
    """The SDK, or CapabilityError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CapabilityError(
            f"the {name} package is not installed; `pip install 'zero-mismatch[agent]'`"
        ) from error


def checked_key(key: str | None, variable: str) -> str:
    """The key, or CapabilityError naming the variable it is read from."""
    if not key or not key.strip():
        raise CapabilityError(
            f"no API key: set {variable}, or use --agent autopilot, which needs none"
        )
    return key.strip()


@contextlib.contextmanager
def faults(sdk: Any) -> Generator[None]:
    """Turn the SDK's errors into ProviderFault."""
    try:
        yield
    except (sdk.AuthenticationError, sdk.PermissionDeniedError) as error:
        raise ProviderFault(
            "key-refused", f"the key was refused ({error.status_code}); check it and its rights"
        ) from error
    except sdk.RateLimitError as error:
        raise ProviderFault(
            "rate-limited", "the rate limit held for all retries; resume the run later"
        ) from error
    except sdk.APIConnectionError as error:
        raise ProviderFault(
            "unreachable", f"no connection ({error}); check the network, then resume the run"
        ) from error
    except sdk.APIResponseValidationError as error:
        raise ProviderFault(
            "nonsense", f"the answer is not what the API promises ({error}); check --base-url"
        ) from error
    except sdk.APIStatusError as error:
        code = error.status_code
        if code >= 500 or code in (408, 409):
            raise ProviderFault(
                "unreachable", f"the provider failed ({code}) on all retries; resume the run later"
            ) from error
        raise ProviderFault(
            "request-refused",
            f"the request was refused ({code}): {error.message[:300]}; check --agent-model",
        ) from error
    except sdk.APIError as error:
        raise ProviderFault("nonsense", f"{error}; check --base-url") from error
    except ValueError as error:  # the body was no JSON
        raise ProviderFault(
            "nonsense", f"the answer cannot be read ({error}); check --base-url"
        ) from error
