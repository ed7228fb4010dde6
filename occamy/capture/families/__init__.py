"""Known template families. A tokenizer whose chat template no family pins is refused, never guessed at."""

from __future__ import annotations

from occamy.capture.families.family import TemplateFamily
from occamy.capture.families.nano import NANO
from occamy.contracts.record import digest_bytes

FAMILIES: tuple[TemplateFamily, ...] = (NANO,)


def find_family(chat_template: str, source: str) -> TemplateFamily:
    """Return the family that pins this chat template; `source` names where the template was read.

    Raises ValueError with the digest when no family declares it.
    """
    digest = digest_bytes(chat_template.encode())
    for family in FAMILIES:
        if digest in family.template_digests:
            return family
    known = ", ".join(f.name for f in FAMILIES)
    raise ValueError(
        f"{source}: chat template {digest} belongs to no known family ({known}); "
        "check its closing token and tool-call format, then add the digest to a family in occamy/capture/families"
    )
