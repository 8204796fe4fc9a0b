"""A tiny MCP server over standard input and output, in plain JSON-RPC: a counter that can be raised and read."""

from __future__ import annotations

import json
import sys

TOOLS = [
    {
        "name": "add",
        "description": "Adds to the counter.",
        "inputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
    {"name": "read", "description": "Reads the counter.", "inputSchema": {"type": "object", "properties": {}}},
    {"name": "dump", "description": "The whole state.", "inputSchema": {"type": "object", "properties": {}}},
]


def main() -> None:
    counter = 0
    for line in sys.stdin:
        message = json.loads(line)
        method, params = message.get("method"), message.get("params") or {}
        if "id" not in message:
            continue
        result: dict = {}
        if method == "initialize":
            result = {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "desk", "version": "1"},
            }
        elif method == "tools/list":
            result = {"tools": TOOLS}
        elif method == "tools/call":
            name, arguments = params["name"], params.get("arguments") or {}
            failed = False
            if name == "add" and arguments.get("n", 0) > 100:
                text, failed = "too much at once", True
            else:
                counter += arguments.get("n", 0) if name == "add" else 0
                text = json.dumps({"counter": counter})
            result = {"content": [{"type": "text", "text": text}], "isError": failed}
        elif method != "ping":
            error = {"code": -32601, "message": f"no method {method}"}
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error}), flush=True)
            continue
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()
