"""The invariant of capture over random conversations: whatever a harness does to its history, each used token is a
target exactly once, in order, nothing else is, and a killed proxy changes none of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from occamy.capture.call import Call, Wanted
from occamy.capture.families.nano import NANO
from occamy.capture.ledger import LedgerTurn, ledger
from occamy.capture.recorder import Recorder
from occamy.capture.render import Renderer
from occamy.capture.replay import check_capture
from occamy.capture.segments import build_segments
from occamy.capture.store import Store
from occamy.capture.turn import Exchange, Prefix, Turn
from occamy.contracts.capture import Auxiliary, CaptureRules, EpisodeSetup, Marked
from occamy.contracts.episode import EpisodeRecord, Origin, Segment
from occamy.nano.tokenizer import build_tokenizer

RULES = CaptureRules(
    announced=("history_pruning",),
    summaries=(Marked(role="user", starts="summary:"), Marked(role="assistant", starts="summary:")),
    pruned=(Marked(role="tool", starts="pruned"),),
    trailers=(Marked(role="user", starts="go on"),),
    auxiliaries=(Auxiliary(run="aux-notes", purpose="summary"), Auxiliary(run="aux-title", purpose="title")),
    subagents=True,
)
ANSWERS = [
    'crm_update{"tier":"góld ☂","id":"A01"}<end>',
    'crm_get{"id":"A01"}crm_get{"id":"B02"}<end>',
    'crm_get{"id":1.0}<end>',
    "<think>look</think>\n done <end>",
    "done<end>",
    'crm_get{"id":"',
    "ok",
]
ECHOES = ["as it came", "sorted", "escaped", "stripped", "thinking dropped", "content none"]
STEP = st.fixed_dictionaries(
    {
        "attempts": st.lists(st.tuples(st.sampled_from(ANSWERS), st.integers(0, 3)), min_size=1, max_size=3),
        "used": st.integers(0, 2),
        "fails": st.booleans(),
        "echo": st.sampled_from(ECHOES),
        "back": st.sampled_from([0, 0, 0, 1, 2, 5]),
        "rewrite": st.sampled_from([None, None, "summary", "assistant summary", "pruning", "both", "announced"]),
        "keep": st.integers(0, 3),
        "trailer": st.booleans(),
        "beside": st.sampled_from([None, None, "sub", "aux-notes", "aux-title"]),
        "cut": st.booleans(),
        "stop": st.sampled_from([(), (), ("on",), ("}cr", "0"), ("e", "k<")]),
    }
)


def echo(message: dict[str, Any], how: str) -> dict[str, Any]:
    """A message as a harness sends it back; tool-call ids always as OpenClaw alters them."""
    sent = dict(message)
    content = sent.get("content")
    if content and how == "stripped":
        sent["content"] = content.strip()
    if content and how == "thinking dropped":
        sent["content"] = re.sub(r"<think>.*?</think>", "", content)
    if calls := sent.get("tool_calls"):
        sent["content"] = None if how == "content none" else content
        sent["tool_calls"] = [{**c, "id": alter(c["id"]), "function": spell(c["function"], how)} for c in calls]
    return sent


def alter(call_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", call_id)[:40]


def spell(function: dict[str, str], how: str) -> dict[str, str]:
    try:
        value = json.loads(function["arguments"])
    except json.JSONDecodeError:
        return {**function, "arguments": "{}" if how == "sorted" else function["arguments"]}
    if how == "stripped":  # as JavaScript writes numbers
        value = {k: int(v) if isinstance(v, float) else v for k, v in value.items()}
    return {**function, "arguments": json.dumps(value, sort_keys=how == "sorted", ensure_ascii=how == "escaped")}


class Played:
    """A harness, the recorder it talks to, and what must come out."""

    def __init__(self, renderer: Renderer, store: Store, name: str, cuts: bool) -> None:
        self.renderer, self.store, self.name, self.cuts = renderer, store, name, cuts
        self.store.open_episode(name, EpisodeSetup(sampled_by="policy", rules=RULES))
        self.recorder = self._recorder([])
        self.history: list[dict[str, Any]] = [
            {"role": "system", "content": "check"},
            {"role": "user", "content": "check A01"},
        ]
        self.line: list[tuple[list[int], int, float]] = []
        """Ids, version and log-prob of the turns that the harness used, to where it stands."""
        self.been: list[tuple[list[dict[str, Any]], int]] = []
        """History up to an answer, and the length of the line with it."""
        self.notes: list[int] = []
        self.attempts: dict[float, list[int]] = {}
        self.prompts: list[tuple[list[int], list[int]]] = []
        self.asked = 0

    def _recorder(self, turns: list[Turn]) -> Recorder:
        return Recorder.restore("e", self.renderer, turns, None, seed=0, rules=RULES, context_limit=1 << 20)

    def ask(
        self,
        text: str,
        version: int,
        role: str,
        messages: list[dict[str, Any]],
        rewrite: str | None,
        stop: tuple[str, ...] = (),
    ) -> Any:
        sent = json.loads(json.dumps(messages))
        call = self.recorder.begin(role, sent, [], rewrite=rewrite, wanted=Wanted(stop=stop))
        body, end = text.removesuffix(NANO.closing), text.endswith(NANO.closing)
        ids = [i for letter in body for i in self.renderer.encode(letter)] + [self.renderer.closing_id] * end
        mark = -float(len(self.attempts) + 1)
        self.attempts[mark] = ids
        finish = "stop" if end else "length"
        turn, message = self.recorder.finish(call, ids, [mark] * len(ids), version, finish)
        self.store.add_turn(self.name, turn, Exchange("", "", "", 0, 0.0), self.recorder.quarantine)
        return call, message, (ids, version, mark)

    def step(self, plan: dict[str, Any], last: bool) -> Iterator[Call]:
        back = plan["back"] if plan["back"] < len(self.been) else 0
        if back:
            kept, size = self.been[-1 - back]
            self.history = [*kept, {"role": "user", "content": f"check {self.asked}"}]
            self.line, self.been = self.line[:size], self.been[: len(self.been) - back]
        rewrite = None if back or len(self.line) == 0 else plan["rewrite"]
        header = "history_pruning" if rewrite == "announced" else None
        if rewrite:
            self.compact(rewrite, plan["keep"], plan["trailer"])
        if plan["fails"]:
            sent = json.loads(json.dumps(self.history))
            self.recorder.abandon(self.recorder.begin("root", sent, [], rewrite=header))
        answers = []
        for text, version in plan["attempts"]:
            call, message, told = self.ask(text, version, "root", self.history, header, plan["stop"])
            assert not any(s in (message["content"] or "") for s in plan["stop"])
            answers.append((message, told))
            self.prompts.append((call.input_ids.tolist(), told[0]))
            yield call
        message, told = answers[len(answers) - 1 if last else plan["used"] % len(answers)]
        same = [t for m, t in answers if said(m) == said(message)]
        self.line.append(told if message.get("tool_calls") else same[-1])
        self.history = [*self.history, echo(message, plan["echo"])]
        self.been.append((list(self.history), len(self.line)))
        for call in message.get("tool_calls", []):
            self.history.append({"role": "tool", "tool_call_id": alter(call["id"]), "content": f"ok {self.asked}"})
        self.history.append({"role": "user", "content": f"check {self.asked}"})
        self.asked += 1
        if plan["beside"]:
            self.beside(plan["beside"])
        if plan["cut"] and self.cuts:
            self.recorder = self._recorder(self.store.read_open(self.name).turns)

    def compact(self, kind: str, keep: int, trailer: bool) -> None:
        """Rewrite the history but for its new messages: those after the last answer stay."""
        at = max(i for i, m in enumerate(self.history) if m["role"] == "assistant" and "summary" not in said(m))
        new = self.history[at:]
        old = self.history[:at]
        if kind in ("pruning", "both", "announced"):
            cut = [m for m in old if m["role"] == "tool" and not m["content"].startswith("pruned")]
            if not cut and kind == "pruning":
                kind = "summary"
            old = [{**m, "content": "pruned"} if m["role"] == "tool" else m for m in old]
        if kind in ("summary", "assistant summary", "both"):
            starts = [i for i, m in enumerate(old) if i > 1 and m["role"] == "assistant"]
            tail = old[starts[-keep] :] if keep and len(starts) >= keep else []
            role = "assistant" if kind == "assistant summary" else "user"
            old = [*old[:2], {"role": role, "content": f"summary:{self.asked}"}, *tail]
        self.history = [*old, *new, *([{"role": "user", "content": "go on"}] if trailer else [])]

    def beside(self, role: str) -> None:
        messages = [{"role": "user", "content": f"check B{self.asked}"}]
        call, message, (ids, *_) = self.ask('crm_get{"id":"B02"}<end>', 1, role, messages, None)
        assert call.prefix is (Prefix.start if role == "sub" else Prefix.auxiliary)
        if role == "aux-notes":
            self.notes += ids
        if role == "sub":
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}
            call, *_ = self.ask("done<end>", 2, role, [*messages, echo(message, "escaped"), result], None)
            assert call.prefix is Prefix.continued


def said(message: dict[str, Any]) -> str:
    return re.sub(r"<think>.*?</think>", "", message.get("content") or "").strip()


def play(renderer: Renderer, store: Store, name: str, plans: list[dict[str, Any]], cuts: bool) -> Played:
    played = Played(renderer, store, name, cuts)
    for number, plan in enumerate(plans):
        following = plans[number + 1] if number + 1 < len(plans) else None
        for _ in played.step(plan, last=following is None):
            pass
    return played


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """The nano template over bytes with merges, so that any text can be said, and in more ways than one."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(ANSWERS, trainer)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in (NANO.closing, *NANO.control)])
    folder = tmp_path_factory.mktemp("wide")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = build_tokenizer().chat_template
    tokenizer.save_pretrained(folder)
    return Renderer(folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(tmp_path_factory.mktemp("capture") / "capture.sqlite")
    yield store
    store.close()


@given(st.lists(STEP, min_size=1, max_size=9))
@settings(max_examples=150, deadline=None)
def test_every_used_token_is_a_target_exactly_once(wide: Renderer, store: Store, plans: list[Any]) -> None:
    played = play(wide, store, "whole", plans, cuts=False)
    assert played.recorder.quarantine is None
    segments = build_segments("e", "policy", played.recorder.turns)
    root = [s for s in segments if s.run == "root"]
    assert targets(root) == [(i, version, mark) for ids, version, mark in played.line for i in ids]
    rest = [s for s in segments if s.run != "root"]
    assert [i for s in rest for i in s.tokens[s.mask].tolist()] == played.notes
    check_alike(segments)
    check_ledger(segments, ledger(played.recorder.turns))
    check_spans(segments, played.attempts)
    used = {(tuple(p), tuple(ids)) for p, ids in played.prompts}
    for ids, _, mark in played.line:
        assert any(holds(s, p, ids, mark) for s in root for p, out in used if list(out) == ids)


@given(st.lists(STEP, min_size=1, max_size=9))
@settings(max_examples=80, deadline=None)
def test_a_killed_proxy_goes_on_to_the_same_segments(wide: Renderer, store: Store, plans: list[Any]) -> None:
    whole = play(wide, store, "whole", plans, cuts=False)
    cut = play(wide, store, "cut", plans, cuts=True)
    assert cut.recorder.turns == whole.recorder.turns
    store.close_episode("cut", None)
    kept, live = store.captured("cut").segments, build_segments("cut", "policy", whole.recorder.turns)
    assert [serialised(s) for s in kept] == [serialised(s) for s in live]


def targets(segments: list[Segment]) -> list[tuple[int, int, float]]:
    return [
        found
        for s in segments
        for found in zip(s.tokens[s.mask].tolist(), s.versions[s.mask].tolist(), s.logprobs[s.mask].tolist())
    ]


def check_alike(segments: list[Segment]) -> None:
    for s in segments:
        sampled = np.isin(s.origin, (Origin.SAMPLED, Origin.SUBAGENT))
        assert np.array_equal(s.mask, s.origin == Origin.SAMPLED)
        assert (s.versions[~sampled] == -1).all() and (s.logprobs[~sampled] == 0).all()
        assert (s.versions[sampled] >= 0).all()
    for run in {s.run for s in segments}:
        own = [s for s in segments if s.run == run]
        assert [s.index for s in own] == list(range(len(own)))
        assert own[-1].closed_by == "end" and all(s.closed_by != "end" for s in own[:-1])


def check_ledger(segments: list[Segment], turns: list[LedgerTurn]) -> None:
    """What is kept of the turns explains the segments, token by token."""
    versions = [v for s in segments for v in s.versions.tolist() if v >= 0]
    record = EpisodeRecord.model_construct(
        episode_id="e", sampled_by="policy", steps=0, segments=len(segments),
        input_tokens=sum(t.prompt_tokens for t in turns), output_tokens=sum(len(t.output) for t in turns),
        version_min=min(versions), version_max=max(versions),
    )  # fmt: skip
    assert check_capture(record, segments, turns) == []


def check_spans(segments: list[Segment], attempts: dict[float, list[int]]) -> None:
    """Each attempt's ids stand in one place, whole and in order, or nowhere."""
    seen: dict[float, list[int]] = {}
    for s in segments:
        for token, mark in zip(s.tokens.tolist(), s.logprobs.tolist()):
            if mark:
                seen.setdefault(mark, []).append(token)
    assert all(ids == attempts[mark] for mark, ids in seen.items())


def holds(segment: Segment, prompt: tuple[int, ...], ids: list[int], mark: float) -> bool:
    size = len(prompt) + len(ids)
    return segment.tokens[:size].tolist() == [*prompt, *ids] and segment.logprobs[len(prompt) : size].tolist() == [
        mark
    ] * len(ids)


def serialised(segment: Segment) -> tuple[Any, ...]:
    arrays = (segment.tokens, segment.mask, segment.logprobs, segment.versions, segment.origin)
    return segment.run, segment.index, segment.closed_by, segment.sampled_by, *(a.tobytes() for a in arrays)
