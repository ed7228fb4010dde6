# mypy: ignore-errors
"""Starts Hermes with its MCP tools in place: `hermes -z` by itself does not wait for them. Runs on Hermes's Python."""

import sys

from hermes_cli.main import main
from tools.mcp_tool import discover_mcp_tools

if not discover_mcp_tools():
    sys.exit(69)  # EX_UNAVAILABLE: the tool server cannot be reached
sys.argv[0] = "hermes"
sys.exit(main())
