"""What a black-box adapter declares: enough to start an agent program, explain its requests and read its ending."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from occamy.contracts.capture import CaptureRules
from occamy.contracts.episode import Outcome
from occamy.contracts.record import Record

PLACES = frozenset(
    {
        *("request", "base", "key", "model", "temperature", "max_new_tokens", "context_limit"),
        *("tools_url", "tools_key", "home", "workspace", "program", "python", "turns", "tool_calls", "wall_seconds"),
    }
)
"""Names that may stand in braces in a command, its environment and its configuration. ``base`` is the episode's
address up to the run: ``{base}/root/v1``. ``program`` is the folder that the program is installed in."""
PLACE = re.compile(r"\{([a-z_]+)\}")


def _regular(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as e:
        raise ValueError(f"no regular expression: {e}") from e
    return pattern


def _below(path: str) -> str:
    place = PurePosixPath(path)
    if not place.name or place.is_absolute() or ".." in place.parts:
        raise ValueError("give a path below the folder, without '..'")
    return path


Pattern = Annotated[str, AfterValidator(_regular)]
Below = Annotated[str, AfterValidator(_below)]
"""A path that stays below its folder."""


class ToolSource(Record):
    """Where the program's tools come from, and how the policy sees them."""

    source: Literal["mcp"] = "mcp"
    """mcp: the world's tools over streamable HTTP; the workspace is the current folder besides."""
    prefix: str = ""
    """What the program puts before the name of a world's tool."""
    result: Pattern = ""
    """Regular expression that finds, in a tool message, the JSON object around the world's answer; "" for none."""
    keys: tuple[str, ...] = ()
    """Keys of that object under which the answer may lie."""
    others: bool = False
    """Whether the program runs tools of its own besides: it may then be busy without a word to model or world."""


class Ending(Record):
    """How an ending is read. What the proxy saw of an infrastructure fault goes before all of it."""

    codes: dict[int, Outcome] = Field(default_factory=lambda: {0: Outcome.completed})
    """Exit status -> outcome; any other status is a crash: infra_failed."""
    answer: str = ""
    """Dotted path to the final text in the JSON object on standard output; "" takes standard output as it is."""
    report: str = ""
    """File that the program writes about its run, a JSON object; "" for none."""
    failed: str = ""
    """Dotted path to the report's flag that is true when the run failed."""
    no_answer: tuple[str, ...] = ()
    """How texts begin that the program prints in place of an answer."""


class Installed(Record):
    """How the program is found, and how it comes there."""

    version_file: Below
    """Glob below the program's folder; the file that states the version."""
    version_pattern: Pattern
    """Regular expression whose first group is the version, searched line by line."""
    steps: tuple[tuple[str, ...], ...]
    """Commands of the set-up. ``{program}``, ``{python}`` and ``{here}`` (the folder of this declaration) are
    filled in."""
    needs: str = ""
    """What the machine must have for that, in words; "" for Python alone."""


class Command(Record):
    """The program runs in the episode's sandbox."""

    kind: Literal["command"] = "command"
    argv: tuple[str, ...] = Field(min_length=1)
    """Command line, started in the workspace."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment beside the sandbox's own."""
    config: dict[Below, Any] = Field(default_factory=dict)
    """Path below the private home -> configuration, written as JSON or YAML by its suffix."""
    scripts: tuple[Below, ...] = ()
    """Files beside the declaration that are copied into the private home as they are."""
    startup_seconds: float = Field(default=0.0, ge=0)
    """Wall time that the program needs before it begins; comes on top of the task's budget."""
    installed: Installed | None = None
    """None when the command is there on any machine."""


class Service(Record):
    """The program runs elsewhere and drives the episode from there: one HTTP request that returns when it is done."""

    kind: Literal["service"] = "service"
    url_from: str
    """Environment variable with the service's URL, ``POST {url}/runs``."""


class Adapter(Record):
    """The declaration of one agent program."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    version: str
    """Version of the program that all of this was seen in."""
    protocol: Literal["openai-chat"] = "openai-chat"
    """What it speaks to the model."""
    tools: ToolSource = ToolSource()
    capture: CaptureRules = CaptureRules()
    """Which requests are policy, housekeeping or summary, and how the program rewrites its history."""
    minimum_context: int = Field(default=0, ge=0)
    """Least context limit that it runs with, tokens."""
    stall_seconds: float = Field(default=30.0, gt=0)
    """Whoever has kept the program waiting this long when wall time ends has failed: an infrastructure fault. Our
    choice, as for compositions."""
    launch: Annotated[Command | Service, Field(discriminator="kind")]
    ending: Ending = Ending()

    @model_validator(mode="after")
    def _places_are_known(self) -> Adapter:
        for text in texts(self.launch.model_dump(exclude={"installed"})):
            for name in PLACE.findall(text):
                if name not in PLACES:
                    raise ValueError(f"{text!r}: nothing is called {{{name}}}; known are {', '.join(sorted(PLACES))}")
        return self


def texts(value: Any) -> Iterator[str]:
    """All strings in plain data, keys of mappings left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(item)


def fill(value: Any, places: dict[str, Any]) -> Any:
    """Plain data with every ``{name}`` replaced; a string that is one name alone becomes the value, typed as it is."""
    if isinstance(value, str):
        alone = PLACE.fullmatch(value)
        return places[alone[1]] if alone else PLACE.sub(lambda m: str(places[m[1]]), value)
    if isinstance(value, dict):
        return {key: fill(item, places) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [fill(item, places) for item in value]
    return value
