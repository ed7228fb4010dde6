"""Runs of one episode: children, forks, housekeeping, raw prompts, other tools, other weights; and going on after a
restart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from occamy.capture.call import Call, EngineAnswerError
from occamy.capture.recorder import Recorder
from occamy.capture.render import Renderer
from occamy.capture.segments import build_segments
from occamy.capture.store import Store
from occamy.capture.template import TemplateError
from occamy.capture.turn import Exchange, Prefix
from occamy.contracts.capture import Auxiliary, CaptureRules, EpisodeSetup, MixedVersions
from occamy.contracts.episode import Origin, QuarantineReason, Segment

Message = dict[str, Any]

ASK = {"role": "user", "content": "set tier of A01 to gold"}
GET = 'crm_get{"id":"A01"}<end>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "crm_get", "parameters": {"type": "object"}}}]
RULES = CaptureRules(
    subagents=True,
    auxiliaries=(Auxiliary(run="aux-notes", purpose="summary"), Auxiliary(run="aux-title", purpose="title")),
)
NOTHING = CaptureRules()


class Talk:
    """A harness in miniature."""

    def __init__(self, renderer: Renderer, rules: CaptureRules = RULES, mixed: MixedVersions = "between_turns") -> None:
        self.renderer = renderer
        self.recorder = Recorder("e", renderer, seed=7, rules=rules, context_limit=4096, mixed_versions=mixed)
        self.history: list[Message] = [ASK]

    def ask(
        self,
        text: str,
        messages: list[Message] | None = None,
        role: str = "root",
        tools: list[Any] = TOOLS,
        version: Any = 3,
    ) -> tuple[Call, Message]:
        call = self.recorder.begin(role, json.loads(json.dumps(messages or self.history)), tools)
        ids = self.ids(text)
        versions = version if isinstance(version, int) else [*version, *[version[-1]] * (len(ids) - len(version))]
        return call, self.recorder.finish(call, ids, [-1.0] * len(ids), versions, "stop")[1]

    def step(self, text: str, result: str | None = None, **options: Any) -> Prefix:
        call, message = self.ask(text, **options)
        self.history.append(message)
        if result is not None:
            self.history.append(observe(message, result))
        return call.prefix

    def ids(self, text: str) -> list[int]:
        return list(self.renderer.encode(text))

    def segments(self) -> list[Segment]:
        return build_segments("e", "policy", self.recorder.turns)


def observe(message: Message, result: str) -> Message:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": result}


@pytest.fixture
def talk(renderer: Renderer) -> Talk:
    return Talk(renderer)


@pytest.mark.parametrize("tools", [TOOLS, []])
def test_a_child_may_fork_from_its_parents_history(talk: Talk, tools: list[Any]) -> None:
    """With the parent's tools it goes on from its ids; with others its prompt is rendered anew."""
    talk.step(GET, "ok")
    goal = {"role": "user", "content": "check B02"}
    call, message = talk.ask(GET, [*talk.history, goal], "sub", tools)
    assert call.prefix is Prefix.branch
    asked = talk.ids("<user>set tier of A01 to gold<assistant>" + GET)
    new = talk.ids("<tool>ok<user>check B02<assistant>")
    parent = talk.recorder.turns[0]
    assert call.input_ids.tolist()[-len(asked + new) :] == asked + new
    assert call.cached_tokens == (len(parent.delta) + len(parent.output) if tools else 0)
    again, _ = talk.ask("done<end>", [*talk.history, goal, message, observe(message, "ok")], "sub", tools)
    assert (again.prefix, again.step.segment.run.name) == (Prefix.continued, "sub-0")
    assert talk.step("done<end>") is Prefix.continued
    root, child = talk.segments()
    assert root.tokens[root.mask].tolist() == talk.ids(GET + "done<end>")
    assert not child.mask.any()
    assert child.tokens[child.origin == Origin.SUBAGENT].tolist() == talk.ids(GET + "done<end>")
    assert talk.recorder.quarantine is None


def test_a_call_that_hangs_while_the_harness_goes_on_differently_costs_nothing(talk: Talk) -> None:
    """The harness gave up waiting and changed its message; what it went on with is the root run, without a gap."""
    talk.step(GET, "ok")
    hanging = talk.recorder.begin("root", json.loads(json.dumps(talk.history)), TOOLS)
    talk.history[-1] = {**talk.history[-1], "content": "none"}
    assert talk.step(GET, "ok") is Prefix.branch
    assert talk.step("done<end>") is Prefix.continued
    talk.recorder.abandon(hanging)
    (segment,) = talk.segments()
    assert (segment.run, segment.closed_by) == ("root", "end")
    assert segment.tokens[segment.mask].tolist() == talk.ids(GET + GET + "done<end>")
    assert talk.recorder.quarantine is None


def test_training_sees_the_ids_that_the_engine_saw(talk: Talk) -> None:
    """Tool calls included: each prompt, with its answer, is how the segment begins."""
    calls = []
    for text, result in ((GET, "ok"), ('crm_get{"id":"', "none"), (GET, "ok")):
        call, message = talk.ask(text)
        calls.append((call.input_ids.tolist(), talk.ids(text)))
        talk.history += [message, observe(message, result)]
    (segment,) = talk.segments()
    for prompt, answer in calls:
        assert segment.tokens[: len(prompt) + len(answer)].tolist() == prompt + answer


def test_children_that_begin_alike_are_told_apart(talk: Talk) -> None:
    talk.step(GET, "ok")
    goal = [{"role": "user", "content": "check B02"}]
    texts = (GET, 'crm_get{"id":"B02"}<end>')
    answers = [talk.ask(text, goal, "sub")[1] for text in texts]  # both begin before either goes on
    for message, text in zip(answers, texts, strict=True):
        call, _ = talk.ask("done<end>", [*goal, message, observe(message, text[:7])], "sub")
        assert call.prefix is not Prefix.unexplained
    later, _ = talk.ask("ok<end>", goal, "sub")  # a third begins when they are done
    assert later.prefix is Prefix.start
    children = {s.run: s.tokens[s.origin == Origin.SUBAGENT].tolist() for s in talk.segments() if s.run != "root"}
    wanted = [talk.ids(text + "done<end>") for text in texts] + [talk.ids("ok<end>")]
    assert sorted(children) == ["sub-0", "sub-1", "sub-2"]
    assert sorted(children.values()) == sorted(wanted)
    assert talk.recorder.quarantine is None


def test_a_summary_asked_for_after_the_history_trains_on_the_summary_alone(talk: Talk) -> None:
    talk.step(GET, "ok")
    request = [*talk.history, {"role": "user", "content": "summary"}]
    call, _ = talk.ask("A01.tier=gold;<end>", request, "aux-notes")
    assert call.prefix is Prefix.auxiliary and call.cached_tokens > 0
    talk.ask("notes<end>", request, "aux-title")
    root, notes, title = talk.segments()
    assert (notes.run, title.run) == ("aux-notes-0", "aux-title-0")
    assert notes.tokens[notes.mask].tolist() == talk.ids("A01.tier=gold;<end>")
    assert (notes.origin[: len(call.input_ids)] == Origin.INHERITED).all()
    assert not title.mask.any() and (title.origin == Origin.SUBAGENT).sum() == len(talk.ids("notes<end>"))
    assert title.logprobs[title.origin == Origin.SUBAGENT].tolist() == [-1.0] * len(talk.ids("notes<end>"))
    assert root.tokens[root.mask].tolist() == talk.ids(GET)


@pytest.mark.parametrize(("role", "forks"), [("sub", False), ("sub", True), ("aux-notes", False), ("aux", True)])
def test_runs_that_the_harness_did_not_declare_are_unexplained(renderer: Renderer, role: str, forks: bool) -> None:
    talk = Talk(renderer, NOTHING)
    talk.step(GET, "ok")
    goal = {"role": "user", "content": "check B02"}
    call, message = talk.ask("done<end>", [*talk.history, goal] if forks else [goal], role)
    assert (call.prefix, message["content"]) == (Prefix.unexplained, "done")
    assert talk.recorder.quarantine is QuarantineReason.unexplained_prefix
    assert [bool(s.mask.any()) for s in talk.segments()] == [True, False]


def test_a_child_with_an_unknown_history_is_unexplained(talk: Talk) -> None:
    talk.step(GET, "ok")
    foreign = [ASK, {"role": "assistant", "content": "done"}, {"role": "user", "content": "check"}]
    assert talk.ask("done<end>", foreign, "sub")[0].prefix is Prefix.unexplained


@pytest.mark.parametrize("declared", [True, False])
def test_other_tools_open_a_segment_if_declared(renderer: Renderer, declared: bool) -> None:
    talk = Talk(renderer, CaptureRules(tools_may_change=declared))
    talk.step(GET, "ok")
    call, message = talk.ask(GET, tools=[])
    assert talk.renderer.decode(call.input_ids).startswith("<user>")
    if not declared:
        assert (call.prefix, talk.recorder.quarantine) == (Prefix.unexplained, QuarantineReason.unexplained_prefix)
        return
    talk.history += [message, observe(message, "ok")]
    assert talk.step("done<end>", tools=[]) is Prefix.continued
    first, second = talk.segments()
    assert (first.closed_by, second.index) == ("tool_change", 1)
    assert [s.tokens[s.mask].tolist() for s in (first, second)] == [talk.ids(GET), talk.ids(GET + "done<end>")]
    assert talk.recorder.quarantine is None


def test_a_raw_prompt_has_a_run_of_its_own(talk: Talk) -> None:
    talk.step(GET, "ok")
    prompt = talk.ids("<user>check A01<assistant>")
    for attempt in range(2):
        call = talk.recorder.begin_text("aux-title", prompt)
        assert (call.prefix is Prefix.retry, call.attempt) == (attempt == 1, attempt)
        assert call.input_ids.tolist() == prompt
        ids = talk.ids(GET)
        message = talk.recorder.finish(call, ids, [0.0] * len(ids), 0, "stop")[1]
        assert message == {"role": "assistant", "content": GET.removesuffix("<end>")}
    assert talk.recorder.quarantine is None
    assert talk.recorder.begin_text("root", prompt).prefix is Prefix.unexplained
    with pytest.raises(TemplateError, match="empty"):
        talk.recorder.begin_text("aux-title", [])
    with pytest.raises(TemplateError, match="100000"):
        talk.recorder.begin_text("aux-title", [100_000])


@pytest.mark.parametrize(
    ("mixed", "inside", "between"),
    [("never", False, False), ("between_turns", False, True), ("within_turns", True, True)],
)
def test_weights_may_change_where_the_recipe_says(
    renderer: Renderer, mixed: MixedVersions, inside: bool, between: bool
) -> None:
    talk = Talk(renderer, mixed=mixed)
    talk.step(GET, "ok", version=3)
    talk.step(GET, "ok", version=4)
    assert (talk.recorder.quarantine is None) is between
    talk = Talk(renderer, mixed=mixed)
    talk.step(GET, "ok", version=[3, 3, 4])
    assert (talk.recorder.quarantine is None) is inside
    if not inside:
        assert talk.recorder.quarantine is QuarantineReason.mixed_weight_versions
    (segment,) = talk.segments()
    assert segment.versions[segment.mask].tolist() == [3, 3] + [4] * (len(talk.ids(GET)) - 2)


def test_versions_must_be_as_many_as_ids(talk: Talk) -> None:
    call = talk.recorder.begin("root", [ASK], TOOLS)
    with pytest.raises(EngineAnswerError, match="2 sampled ids came with 2 log-probs and 3 weight versions"):
        talk.recorder.finish(call, [5, 6], [0.0, 0.0], [1, 1, 1], "stop")


def test_seeds_and_call_ids_do_not_depend_on_who_asks_first(renderer: Renderer) -> None:
    def asked(order: list[str]) -> dict[str, tuple[int, str]]:
        talk = Talk(renderer)
        talk.step(GET, "ok")
        found = {}
        for text in order:
            call, message = talk.ask(GET, [{"role": "user", "content": text}], "sub")
            found[text] = call.seed, message["tool_calls"][0]["id"]
        return found

    assert asked(["check A01", "check B02"]) == asked(["check B02", "check A01"])


def test_a_prompt_handed_out_does_not_change_and_cannot_be_changed(talk: Talk) -> None:
    call, message = talk.ask(GET)
    before = call.input_ids.tolist()
    talk.history += [message, observe(message, "ok" * 200)]
    talk.ask("done<end>")
    assert call.input_ids.tolist() == before
    with pytest.raises(ValueError, match="read-only"):
        call.input_ids[0] = 1


KILLED = """
import importlib.util, json, os, signal, sys
from pathlib import Path
sys.path[:0] = json.loads(sys.argv[1])
spec = importlib.util.spec_from_file_location("here", sys.argv[2])
here = importlib.util.module_from_spec(spec)
spec.loader.exec_module(here)
talk = here.Talk(here.Renderer(Path(sys.argv[3])))
store = here.Store(Path(sys.argv[4]))
store.open_episode("e", here.EpisodeSetup(sampled_by="policy", seed=7, rules=here.RULES, key_digest="sha256:k"))
here.first_half(talk, store)
talk.recorder.begin("root", talk.history, here.TOOLS)
print(json.dumps(talk.history), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def first_half(talk: Talk, store: Store) -> None:
    talk.step(GET, "ok")
    talk.ask("A01.tier=gold;<end>", [{"role": "user", "content": "summary"}], "aux-notes")
    talk.ask("lost<end>")
    talk.step(GET, "ok")
    keep(talk, store)


def second_half(talk: Talk) -> None:
    assert talk.step(GET, "ok") is Prefix.continued
    assert talk.ask("done<end>", [{"role": "user", "content": "check B02"}], "sub")[0].prefix is Prefix.start
    assert talk.step("done<end>") is Prefix.continued


def keep(talk: Talk, store: Store) -> None:
    stored = len(store.turns("e"))
    for turn in talk.recorder.turns[stored:]:
        store.add_turn("e", turn, Exchange("", "", "", 0, 0.0), talk.recorder.quarantine)


def test_a_killed_process_goes_on_with_its_episode(renderer: Renderer, tokenizer_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "capture.sqlite"
    arguments = [json.dumps(sys.path), __file__, str(tokenizer_dir), str(path)]
    ran = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, timeout=120, check=False)
    assert ran.returncode == -9, ran.stderr.decode()

    store = Store(path)
    assert list(store.open_episodes()) == ["e"]
    saved = store.read_open("e")
    assert (saved.setup.key_digest, saved.setup.rules, saved.quarantine) == ("sha256:k", RULES, None)
    talk = Talk(renderer)
    talk.recorder = Recorder.restore(
        "e", renderer, saved.turns, saved.quarantine, seed=saved.setup.seed, rules=saved.setup.rules, context_limit=4096
    )
    talk.history = json.loads(ran.stdout)
    second_half(talk)
    keep(talk, store)
    store.close_episode("e", talk.recorder.quarantine)

    whole, other = Talk(renderer), Store(tmp_path / "other.sqlite")
    other.open_episode("e", saved.setup)
    first_half(whole, other)
    second_half(whole)
    kept = store.captured("e").segments
    assert len(kept) == 3
    for a, b in zip(kept, whole.segments(), strict=True):
        assert (a.run, a.index, a.closed_by) == (b.run, b.index, b.closed_by)
        for name in ("tokens", "mask", "logprobs", "versions", "origin"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name
    with pytest.raises(KeyError, match="no open episode e"):
        store.read_open("e")


def test_a_restart_keeps_why_an_episode_is_quarantined(renderer: Renderer, tmp_path: Path) -> None:
    store = Store(tmp_path / "capture.sqlite")
    for name, reasons in (("turn", []), ("call", [QuarantineReason.infra_failed, QuarantineReason.token_mismatch])):
        store.open_episode(name, EpisodeSetup(sampled_by="policy"))
        for reason in reasons:
            store.set_quarantine(name, reason)
    talk = Talk(renderer, NOTHING)
    talk.ask("done<end>", role="sub")
    (turn,) = talk.recorder.turns
    store.add_turn("turn", turn, Exchange("", "", "", 0, 0.0), talk.recorder.quarantine)
    assert store.read_open("turn").quarantine is QuarantineReason.unexplained_prefix
    assert store.read_open("call").quarantine is QuarantineReason.infra_failed
    store.close_episode("call", QuarantineReason.token_mismatch)
    assert store.captured("call").quarantine is QuarantineReason.infra_failed


def test_a_restart_orders_turns_by_when_they_were_asked_for(renderer: Renderer) -> None:
    """Two calls hang while the harness rewrites its history twice; one is answered late, the other never."""
    rules = CaptureRules(announced=("summary_replacement",))
    whole, cut = Talk(renderer, rules), Talk(renderer, rules)
    for talk in (whole, cut):
        talk.step(GET, "ok")
        late = talk.recorder.begin("root", json.loads(json.dumps(talk.history)), TOOLS)
        talk.recorder.begin("root", [{"role": "user", "content": "summary:"}], TOOLS, rewrite="summary_replacement")
        talk.history = [ASK, {"role": "user", "content": "summary:gold"}]
        call = talk.recorder.begin("root", talk.history[:], TOOLS, rewrite="summary_replacement")
        _, message = talk.recorder.finish(call, talk.ids(GET), [-1.0] * len(talk.ids(GET)), 3, "stop")
        talk.history += [message, observe(message, "ok")]
        talk.recorder.finish(late, talk.ids("late<end>"), [-1.0, -1.0], 3, "stop")
    turns = cut.recorder.turns
    cut.recorder = Recorder.restore("e", renderer, turns, None, seed=7, rules=rules, context_limit=4096)
    for talk in (whole, cut):
        assert talk.step("done<end>") is Prefix.continued
    assert cut.recorder.turns == whole.recorder.turns
    assert [s.tokens[s.mask].tolist() for s in cut.segments()] == [
        cut.ids(GET + "late<end>"),
        cut.ids(GET + "done<end>"),
    ]
