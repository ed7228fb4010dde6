"""A random nano checkpoint, a sealed release of synthesised tasks, and a policy that is a function of its prompt."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from occamy.contracts.lineage import LineageCard, tokenizer_digest, weights_digest, write_card
from occamy.contracts.manifest import seal
from occamy.contracts.release import KIND, contract_bytes, contract_path
from occamy.contracts.task import FieldSpec, WorldSpec
from occamy.nano.model import Shape, init_weights, save_model
from occamy.nano.tokenizer import save_tokenizer
from occamy.rollout.config import DemonstrationConfig, RolloutConfig
from occamy.rollout.demonstrate import demonstrate
from occamy.synthesis.author import Slot
from occamy.synthesis.config import SynthesisConfig
from occamy.synthesis.variants import write_task
from occamy.worlds.tools import tool_names, tool_schemas

sys.path.append(str(Path(__file__).parent))  # for the modules that lie beside the tests

WORDS = ("the", "order", "of", "account", "is", "billed", "on", "monday", "and", "shipped", "to", "north", "depot")
"""A token each, after a space."""
WORLD = WorldSpec(services={"account": {"tier": FieldSpec(kind="enum", values=("gold", "iron"))}}, records={})


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano model with random weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    shape = Shape()
    save_model(folder, init_weights(shape, 1), shape)
    save_tokenizer(folder)
    weights, tokenizer = weights_digest(folder), tokenizer_digest(folder)
    card = LineageCard(
        name="random", stage="pretrain", root=weights, tokenizer_digest=tokenizer, weights_digest=weights
    )
    write_card(folder, card)
    return folder


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty training tasks, half of them long, sealed as an admission would."""
    folder = tmp_path_factory.mktemp("release")
    for index in range(10):
        for pool in ("long", "short"):
            task = write_task(Slot("train", pool, index), SynthesisConfig(fault_share=0.3), 7)
            path = contract_path(folder, task.meta.task_id)
            path.parent.mkdir(parents=True)
            path.write_bytes(contract_bytes(task))
    seal(folder, KIND)
    return folder


@pytest.fixture(scope="session")
def demonstrations(release: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty demonstrations of that release by the oracle, sealed."""
    out = tmp_path_factory.mktemp("demos") / "sealed"
    demonstrate(release, checkpoint, out, DemonstrationConfig(rollout=RolloutConfig(concurrency=8)), 3)
    return out


@pytest.fixture(scope="session")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder: byte-level, about four characters a token, with the chat template of Qwen3-Instruct."""
    trl = importlib.util.find_spec("trl")
    if trl is None or not trl.submodule_search_locations:
        pytest.skip("the published chat templates come with the package trl; install the extra dev")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    schemas = [json.dumps(tool) for tool in tool_schemas(WORLD, tool_names(WORLD))]
    backend.train_from_iterator([" ".join(WORDS * 9), *schemas], trainer)
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    template = Path(trl.submodule_search_locations[0]) / "chat_templates" / "qwen3_instruct_2507.jinja"
    tokenizer.chat_template = template.read_text()
    folder = tmp_path_factory.mktemp("chatml")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def long_text() -> Callable[[int], str]:
    """Return a function from a number to a text of its own, about 36,000 characters and 6,700 tokens of `chatml`."""
    return lambda number: " ".join(WORDS[(i + i * number // 7) % len(WORDS)] for i in range(6700))


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


@pytest.fixture
def policy(chatml: Path) -> Iterator[WrittenPolicy]:
    written = WrittenPolicy(chatml)
    yield written
    written.close()
