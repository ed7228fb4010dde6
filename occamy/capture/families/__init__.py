"""Known template families. A tokenizer whose chat template no family pins is refused, never guessed at."""

from __future__ import annotations

from occamy.capture.families.family import TemplateFamily
from occamy.capture.families.llama3 import LLAMA3
from occamy.capture.families.nano import NANO
from occamy.capture.families.qwen3 import QWEN3
from occamy.capture.families.qwen35 import QWEN35
from occamy.contracts.record import digest_bytes

FAMILIES: tuple[TemplateFamily, ...] = (NANO, QWEN3, QWEN35, LLAMA3)


def find_family(chat_template: str, source: str) -> TemplateFamily:
    """Return the family that pins this chat template; `source` names where the template was read.

    Raises ValueError with the digest, and the families that speak with the same tokens, when no family declares it.
    """
    digest = digest_bytes(chat_template.encode())
    for family in FAMILIES:
        if digest in family.template_digests:
            return family
    known = ", ".join(f.name for f in FAMILIES)
    alike = " or ".join(f.name for f in FAMILIES if f.closing in chat_template)
    raise ValueError(
        f"{source}: chat template {digest} belongs to no known family ({known}). If it renders, closes turns and "
        f"calls tools as {alike or 'one of them'} does, add this digest to template_digests in that family's file in "
        "occamy/capture/families; otherwise declare a new family there. Then add the template to "
        "tests/capture/test_capture_families_published.py, which checks what a family claims"
    )
