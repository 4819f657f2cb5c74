"""Models whose code comes with them, over MCP: only from the person's own part of the workspace."""

from pathlib import Path

import pytest

from zeromismatch.agent_tools.jobs.operations import OPERATIONS
from zeromismatch.agent_tools.server.confine import confined
from zeromismatch.kernels.errors import UsageError


@pytest.mark.parametrize("spec", ["code:../model", "code:/etc", "code:~/model", "code:a/../../m"])
def test_code_outside_the_workspace_is_refused(spec: str, tmp_path: Path):
    with pytest.raises(UsageError, match="no file or folder of the workspace"):
        confined(OPERATIONS["inspect"], {"model": spec}, tmp_path)


def test_code_that_tools_could_have_written_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="tools write to"):
        confined(OPERATIONS["inspect"], {"model": "code:runs/x/model"}, tmp_path)


def test_code_of_the_workspace_is_named_relative_to_it(tmp_path: Path):
    for spec in ("code:models/heron", f"code:{tmp_path}/models/heron"):
        found = confined(OPERATIONS["inspect"], {"model": spec}, tmp_path)
        assert found == {"model": "code:models/heron"}
