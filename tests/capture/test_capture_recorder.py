"""Request classes and token histories, with ids spelled out through the tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from occamy.capture.call import Call, ContextLimitError, Wanted
from occamy.capture.recorder import Recorder
from occamy.capture.render import Renderer
from occamy.capture.segments import build_segments
from occamy.capture.turn import Prefix
from occamy.contracts.capture import Auxiliary, CaptureRules
from occamy.contracts.episode import Origin, QuarantineReason, Segment

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "crm_update", "parameters": {"type": "object", "properties": {"id": {}, "tier": {}}}},
    }
]
GET = 'crm_get{"id":"A01"}<end>'
ASK = {"role": "user", "content": "set tier of A01 to gold"}
PROMPT = "<tools>crm:tier ;<user>set tier of A01 to gold<assistant>"


NOTHING = CaptureRules()


class Talk:
    """A harness in miniature: sends its history, appends the answer."""

    def __init__(self, renderer: Renderer, rules: CaptureRules = NOTHING, limit: int = 1024) -> None:
        self.renderer = renderer
        self.recorder = Recorder("e", renderer, seed=7, rules=rules, context_limit=limit)
        self.history: list[dict[str, Any]] = [ASK]

    def begin(self, messages: list[dict[str, Any]] | None = None, role: str = "root", **options: Any) -> Call:
        sent = [dict(m) for m in (self.history if messages is None else messages)]
        return self.recorder.begin(role, sent, options.pop("tools", TOOLS), **options)

    def finish(self, call: Call, text: str, finish: str = "stop") -> dict[str, Any]:
        ids = list(self.renderer.encode(text))
        return self.recorder.finish(call, ids, [-1.0] * len(ids), 3, finish)[1]

    def step(self, text: str, result: str | None = None, **options: Any) -> Prefix:
        call = self.begin(**options)
        message = self.finish(call, text)
        self.history.append(message)
        if result is not None:
            self.history.append(observe(message, result))
        return call.prefix

    def segments(self) -> list[Segment]:
        return build_segments("e", "policy", self.recorder.turns)

    def ids(self, text: str) -> list[int]:
        return list(self.renderer.encode(text))


def observe(message: dict[str, Any], result: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": result}


@pytest.fixture
def talk(renderer: Renderer) -> Talk:
    return Talk(renderer)


def test_a_continued_prompt_is_prompt_answer_and_new_tokens(talk: Talk) -> None:
    first = talk.begin()
    assert (first.prefix, first.input_ids.tolist()) == (Prefix.start, talk.ids(PROMPT))
    message = talk.finish(first, GET)
    talk.history += [message, observe(message, '{"tier":"gold"}')]
    second = talk.begin()
    assert second.prefix is Prefix.continued
    assert second.input_ids.tolist() == talk.ids(PROMPT + GET + '<tool>{"tier":"gold"}<assistant>')
    assert second.cached_tokens == len(talk.ids(PROMPT + GET))


def test_a_segment_masks_exactly_the_sampled_tokens(talk: Talk) -> None:
    talk.step(GET, "ok")
    talk.step("done<end>")
    (segment,) = talk.segments()
    prompt, call, seen, end = (talk.ids(t) for t in (PROMPT, GET, "<tool>ok<assistant>", "done<end>"))
    assert segment.tokens.tolist() == prompt + call + seen + end
    assert segment.mask.tolist() == [False] * len(prompt) + [True] * len(call) + [False] * len(seen) + [True] * len(end)
    assert segment.logprobs.tolist() == [-1.0 if m else 0.0 for m in segment.mask]
    assert segment.versions.tolist() == [3 if m else -1 for m in segment.mask]
    assert segment.origin[0] == Origin.INHERITED
    assert segment.origin[len(prompt) + len(call)] == Origin.OBSERVED
    assert (segment.run, segment.index, segment.closed_by) == ("root", 0, "end")


def test_ids_are_kept_when_the_tokenizer_would_join_them_otherwise(talk: Talk) -> None:
    """`","page":` is one token; a policy that spells it in three keeps its three."""
    pieces = ["crm", '_get{"id":"', "A01", '","', "page", '":', "2", "}", "<end>"]
    spelled = [i for piece in pieces for i in talk.ids(piece)]
    call = talk.begin()
    message = talk.recorder.finish(call, spelled, [0.0] * len(spelled), 0, "stop")[1]
    assert len(talk.ids(talk.renderer.decode(spelled))) == len(spelled) - 2
    talk.history += [message, observe(message, "ok")]
    assert talk.begin().input_ids.tolist() == talk.ids(PROMPT) + spelled + talk.ids("<tool>ok<assistant>")


@pytest.mark.parametrize(
    "echo",
    [
        {"content": None},
        {"content": "said beside the call"},
        {"arguments": ' {"tier": "\\u0067old", "id": "A01"} '},
        {"reasoning_content": "x"},
    ],
)
def test_an_echo_reworked_by_the_harness_finds_the_same_ids(talk: Talk, echo: dict[str, Any]) -> None:
    sampled = 'crm_update{"id":"A01","tier":"gold"}<end>'
    call = talk.begin()
    message = talk.finish(call, sampled)
    handed = message["tool_calls"][0]
    arguments = echo.pop("arguments", handed["function"]["arguments"])
    function = {"name": handed["function"]["name"], "arguments": arguments}
    echoed = {**message, **echo, "tool_calls": [{"id": handed["id"], "type": "function", "function": function}]}
    talk.history += [echoed, observe(message, "ok")]
    again = talk.begin()
    assert again.prefix is Prefix.continued
    assert again.input_ids.tolist() == talk.ids(PROMPT + sampled + "<tool>ok<assistant>")


def test_broken_arguments_may_come_back_repaired(talk: Talk) -> None:
    call = talk.begin()
    message = talk.finish(call, 'crm_get{"id":"A01<end>')
    assert message["tool_calls"][0]["function"]["arguments"] == '{"id":"A01'
    repaired = {**message["tool_calls"][0], "function": {"name": "crm_get", "arguments": "{}"}}
    talk.history += [{**message, "tool_calls": [repaired]}, observe(message, '{"error":"invalid_argument"}')]
    assert talk.begin().prefix is Prefix.continued


def test_thinking_and_outer_whitespace_may_be_dropped_from_text(talk: Talk) -> None:
    talk.finish(talk.begin(), "done<end>")
    talk.history += [
        {"role": "assistant", "content": " <think>x</think>\ndone \n"},
        {"role": "user", "content": "check"},
    ]
    again = talk.begin()
    assert (again.prefix, again.input_ids.tolist()) == (
        Prefix.continued,
        talk.ids(PROMPT + "done<end><user>check<assistant>"),
    )


def test_only_the_attempt_that_the_harness_used_is_trained(talk: Talk) -> None:
    lost = talk.begin()
    talk.finish(lost, GET)
    used = talk.begin()
    assert (used.prefix, used.attempt, used.input_ids.tolist()) == (Prefix.retry, 1, lost.input_ids.tolist())
    assert used.seed != lost.seed
    message = talk.finish(used, 'crm_get{"id":"B02"}<end>')
    talk.history += [message, observe(message, "ok")]
    talk.step("done<end>")
    (segment,) = talk.segments()
    assert segment.tokens[segment.mask].tolist() == talk.ids('crm_get{"id":"B02"}<end>done<end>')


def test_an_earlier_attempt_may_be_the_used_one(talk: Talk) -> None:
    used = talk.finish(talk.begin(), GET)
    talk.finish(talk.begin(), 'crm_get{"id":"B02"}<end>')
    talk.history += [used, observe(used, "ok")]
    assert talk.step("done<end>") is Prefix.continued
    (segment,) = talk.segments()
    assert segment.tokens[segment.mask].tolist() == talk.ids(GET + "done<end>")


def test_a_late_first_attempt_does_not_displace_the_retry(talk: Talk) -> None:
    slow, retry = talk.begin(), talk.begin()
    talk.finish(retry, "done<end>")
    talk.finish(slow, "ok<end>")
    (segment,) = talk.segments()
    assert segment.tokens[segment.mask].tolist() == talk.ids("done<end>")


def test_continuing_an_earlier_turn_forks_a_run_without_targets(talk: Talk) -> None:
    talk.step(GET, "ok")
    fork = [*talk.history[:2], {**talk.history[2], "content": "none"}]
    talk.step(GET, "ok")
    call = talk.begin(fork)
    assert (call.prefix, call.input_ids.tolist()) == (Prefix.branch, talk.ids(PROMPT + GET + "<tool>none<assistant>"))
    message = talk.finish(call, GET)
    again = talk.begin([*fork, message, observe(message, "ok")])
    assert again.prefix is Prefix.continued
    talk.finish(again, "ok<end>")
    assert talk.step("done<end>") is Prefix.continued
    root, branch = talk.segments()
    assert (root.run, branch.run) == ("root", "branch-0")
    assert root.tokens[root.mask].tolist() == talk.ids(GET + GET + "done<end>")
    assert not branch.mask.any()
    assert branch.tokens[branch.origin == Origin.SUBAGENT].tolist() == talk.ids(GET + "ok<end>")
    assert branch.logprobs[branch.origin == Origin.SUBAGENT].tolist() == [-1.0] * len(talk.ids(GET + "ok<end>"))
    assert branch.versions[branch.origin == Origin.SUBAGENT].tolist() == [3] * len(talk.ids(GET + "ok<end>"))
    assert (branch.origin[: len(call.input_ids)] == Origin.INHERITED).all()
    assert talk.recorder.quarantine is None


def test_the_line_that_the_harness_went_on_with_is_the_root_run(talk: Talk) -> None:
    """An answer got lost, the harness changed its last message: what it never used is the fork."""
    talk.step(GET, "ok")
    changed = [*talk.history[:2], {**talk.history[2], "content": "none"}]
    lost = talk.begin()
    talk.finish(lost, "done<end>")
    talk.history = changed
    assert talk.step(GET, "ok") is Prefix.branch
    talk.step("ok<end>")
    root, fork = talk.segments()
    prompt = talk.ids(PROMPT + GET + "<tool>none<assistant>" + GET + "<tool>ok<assistant>ok<end>")
    assert (root.run, root.tokens.tolist()) == ("root", prompt)
    assert root.tokens[root.mask].tolist() == talk.ids(GET + GET + "ok<end>")
    assert (fork.run, fork.tokens.tolist()) == ("branch-0", talk.ids(PROMPT + GET + "<tool>ok<assistant>done<end>"))
    assert not fork.mask.any()
    assert fork.tokens[fork.origin == Origin.SUBAGENT].tolist() == talk.ids("done<end>")


def test_a_fork_from_an_attempt_that_was_not_used_keeps_it_as_sampled(talk: Talk) -> None:
    messages = [talk.finish(talk.begin(), text) for text in (GET, 'crm_get{"id":"B02"}<end>')]
    first, second = ([ASK, m, observe(m, "ok")] for m in messages)
    talk.finish(talk.begin(first), "ok<end>")
    assert talk.begin(second).prefix is Prefix.branch
    talk.history = [*first, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "check"}]
    talk.step("done<end>")
    fork = talk.begin([*second[:2], {**second[2], "content": "none"}])
    talk.finish(fork, "done<end>")
    root, branch = talk.segments()
    assert root.tokens[root.mask].tolist() == talk.ids('crm_get{"id":"B02"}<end>done<end>')
    assert branch.tokens[branch.origin == Origin.SUBAGENT].tolist() == talk.ids(GET + "ok<end>done<end>")


@pytest.mark.parametrize(
    "change", ["first message", "arguments", "foreign answer", "tools", "system inserted", "second start"]
)
def test_unexplained_requests_quarantine_and_are_still_answered(talk: Talk, change: str) -> None:
    talk.step(GET, "ok")
    request, tools = [dict(m) for m in talk.history], TOOLS
    if change == "first message":
        request[0]["content"] = "set tier of B02 to gold"
    elif change == "arguments":
        handed = request[1]["tool_calls"][0]
        request[1]["tool_calls"] = [{**handed, "function": {"name": "crm_get", "arguments": '{"id":"B02"}'}}]
    elif change == "foreign answer":
        request[1] = {"role": "assistant", "content": "done"}
    elif change == "tools":
        tools = []
    elif change == "system inserted":
        request.append({"role": "system", "content": "check"})
    else:
        request = [{"role": "user", "content": "check B02"}]
    call = talk.begin(request, tools=tools)
    assert call.prefix is Prefix.unexplained and len(call.input_ids)
    assert talk.recorder.quarantine is QuarantineReason.unexplained_prefix
    assert talk.finish(call, "done<end>")["content"] == "done"
    stray = talk.segments()[1]
    assert (stray.run, stray.mask.any()) == ("stray-0", False)


def test_a_declared_rewrite_closes_the_segment_and_opens_the_next(renderer: Renderer) -> None:
    talk = Talk(renderer, rules=CaptureRules(announced=("summary_replacement",)))
    talk.step(GET, "ok")
    talk.history.append({"role": "user", "content": "summary"})
    talk.step("A01.tier=gold;<end>")
    talk.history = [ASK, {"role": "user", "content": "summary:A01.tier=gold;"}, *talk.history[1:3]]
    call = talk.begin(rewrite="summary_replacement")
    assert call.prefix is Prefix.rewrite
    assert call.input_ids.tolist() == talk.ids(
        PROMPT[:-11] + "<user>summary:A01.tier=gold;<assistant>" + GET + "<tool>ok<assistant>"
    )
    assert call.cached_tokens == len(talk.ids(PROMPT[:-11]))
    message = talk.finish(call, GET)
    talk.history += [message, observe(message, "ok")]
    assert talk.step("done<end>") is Prefix.continued
    first, second = talk.segments()
    assert (first.index, first.closed_by, second.index, second.closed_by) == (0, "summary_replacement", 1, "end")
    assert first.tokens[first.mask].tolist() == talk.ids(GET + "A01.tier=gold;<end>")
    assert second.tokens[second.mask].tolist() == talk.ids(GET + "done<end>")
    assert (second.origin[: len(call.input_ids)] == Origin.INHERITED).all()
    assert talk.recorder.quarantine is None


def test_pruning_back_to_the_first_prompt_is_no_retry_but_repeating_it_is(renderer: Renderer) -> None:
    talk = Talk(renderer, rules=CaptureRules(announced=("history_pruning",)))
    talk.step(GET, "ok")
    talk.history = [ASK]
    pruned = talk.begin(rewrite="history_pruning")
    assert pruned.prefix is Prefix.rewrite
    talk.recorder.abandon(pruned)
    assert talk.begin(rewrite="history_pruning").prefix is Prefix.rewrite
    assert talk.begin(rewrite="history_pruning").prefix is Prefix.retry


def test_a_rewrite_that_the_episode_did_not_declare_is_unexplained(talk: Talk) -> None:
    talk.step(GET, "ok")
    assert talk.begin([ASK], rewrite="history_pruning").prefix is Prefix.unexplained


def test_a_rewritten_prefix_shows_calls_as_sampled_not_as_reworked(renderer: Renderer) -> None:
    talk = Talk(renderer, rules=CaptureRules(announced=("history_pruning",)))
    sampled = 'crm_update{"id":"A01","tier":"gold"}<end>'
    message = talk.finish(talk.begin(), sampled)
    handed = message["tool_calls"][0]
    reworked = {**handed, "function": {"name": "crm_update", "arguments": '{ "tier": "gold", "id": "A01" }'}}
    history = [ASK, {**message, "tool_calls": [reworked]}, observe(message, "pruned")]
    call = talk.begin(history, rewrite="history_pruning")
    assert call.input_ids.tolist() == talk.ids(PROMPT + sampled + "<tool>pruned<assistant>")


def test_a_turn_cut_by_length_is_closed_by_a_token_without_loss(talk: Talk) -> None:
    message = talk.finish(talk.begin(), 'crm_get{"id":"A01', finish="length")
    talk.history += [message, observe(message, '{"error":"invalid_argument"}')]
    talk.step("done<end>")
    (segment,) = talk.segments()
    cut, seen = talk.ids('crm_get{"id":"A01'), talk.ids('<end><tool>{"error":"invalid_argument"}<assistant>')
    assert segment.tokens.tolist() == talk.ids(PROMPT) + cut + seen + talk.ids("done<end>")
    assert segment.tokens[segment.mask].tolist() == cut + talk.ids("done<end>")


def test_interleaved_subagents_and_housekeeping_keep_their_own_runs(renderer: Renderer) -> None:
    talk = Talk(renderer, CaptureRules(subagents=True, auxiliaries=(Auxiliary(run="aux", purpose="title"),)))
    talk.step(GET, "ok")
    goals = [[{"role": "user", "content": text}] for text in ("check A01", "check B02")]
    for goal in goals:
        call = talk.begin(goal, role="sub")
        assert call.prefix is Prefix.start
        message = talk.finish(call, GET)
        goal += [message, observe(message, "ok")]
    for goal in goals:
        call = talk.begin(goal, role="sub")
        assert call.prefix is Prefix.continued
        talk.finish(call, "done<end>")
    housekeeping = talk.begin([{"role": "user", "content": "name it"}], role="aux")
    assert housekeeping.prefix is Prefix.auxiliary
    talk.finish(housekeeping, "notes<end>")
    assert talk.step("done<end>") is Prefix.continued
    assert [s.run for s in talk.segments()] == ["root", "sub-0", "sub-1", "aux-0"]
    assert [bool(s.mask.any()) for s in talk.segments()] == [True, False, False, False]


def test_a_call_without_answer_leaves_no_trace(talk: Talk) -> None:
    """Some harnesses change their message after an error; the turn that nobody answered is not history."""
    talk.step(GET, "ok")
    talk.recorder.abandon(talk.begin())
    changed = [*talk.history[:2], {**talk.history[2], "content": "none"}]
    call = talk.begin(changed)
    assert (call.prefix, call.input_ids.tolist()) == (
        Prefix.continued,
        talk.ids(PROMPT + GET + "<tool>none<assistant>"),
    )
    talk.finish(call, "done<end>")
    (segment,) = talk.segments()
    assert segment.tokens[segment.mask].tolist() == talk.ids(GET + "done<end>")


def test_an_abandoned_first_call_may_be_replaced(talk: Talk) -> None:
    talk.recorder.abandon(talk.begin())
    assert talk.begin([{"role": "user", "content": "check A01"}]).prefix is Prefix.start
    assert talk.recorder.quarantine is None


def test_the_context_limit_counts_prompt_and_answer_and_changes_nothing(renderer: Renderer) -> None:
    size = len(renderer.encode(PROMPT))
    talk = Talk(renderer, limit=size + 8)
    with pytest.raises(ContextLimitError, match=rf"maximum context length is {size + 8} tokens.*requested {size + 9}"):
        talk.begin(wanted=Wanted(9))
    assert talk.begin(wanted=Wanted(8)).max_new_tokens == 8
    assert talk.begin().max_new_tokens == 8
    talk = Talk(renderer, rules=CaptureRules(announced=("history_pruning",)), limit=size + 16)
    talk.step(GET, '{"ids":["A01","B02"],"next":2}')
    with pytest.raises(ContextLimitError):
        talk.begin(wanted=Wanted(8))
    assert talk.begin([*talk.history[:2], {**talk.history[2], "content": "ok"}]).prefix is Prefix.continued


def test_tool_call_ids_are_unique_short_and_repeat_with_the_episode(renderer: Renderer) -> None:
    def call_ids() -> list[str]:
        talk = Talk(renderer)
        two = talk.finish(talk.begin(), 'crm_get{"id":"A01"}crm_get{"id":"A01"}<end>')
        retried = talk.finish(talk.begin(), GET)
        return [c["id"] for m in (two, retried) for c in m["tool_calls"]]

    ids = call_ids()
    assert len(set(ids)) == 3 and ids == call_ids()
    assert all(i.isalnum() and len(i) <= 40 for i in ids)
