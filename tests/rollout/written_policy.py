"""A policy that is a function of its prompt, behind the wire contract of an engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast


class WrittenPolicy:
    """An engine whose answer to a prompt is what `write` makes of its text; SGLang's /generate, token ids in and out.

    `sampled` keeps (prompt text, sampled ids) in order. An answer of None is a failure of the engine, HTTP 500.
    """

    def __init__(self, tokenizer: Path) -> None:
        self.write: Callable[[str], str | None] = lambda prompt: "done"
        self.sampled: list[tuple[str, list[int]]] = []
        self.ended = threading.Event()
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer)
        policy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send(200, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = policy.answer(body) if self.path == "/generate" else {}
                self._send(500 if answer is None else 200, answer or {"error": {"message": "out of order"}})

            def _send(self, status: int, answer: dict[str, Any]) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = "http://127.0.0.1:{1}".format(*self._server.server_address)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, body: dict[str, Any]) -> dict[str, Any] | None:
        prompt = self._tokenizer.decode(body["input_ids"])
        text = self.write(prompt)
        if text is None:
            return None
        ids = self._tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
        self.sampled.append((prompt, ids))
        meta = {
            "id": body.get("rid"),
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": "3",
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        return {"text": text, "output_ids": ids, "meta_info": meta}

    def close(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
