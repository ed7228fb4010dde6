"""Names of the stages in the order of the recipe; folders, progress lines, logs and MLflow tags use exactly these."""

PREFLIGHT = "preflight"
SYNTHESIS = "synthesis"
ADMISSION = "admission"
DEMONSTRATIONS = "demonstrations"
MARATHON_SFT = "marathon-sft"
MARATHON = "marathon"
SPRINT = "sprint"
SOUP = "soup"
SAO = "sao"
EVALUATION = "evaluation"
PROMOTION = "promotion"

STAGES = (
    PREFLIGHT,
    SYNTHESIS,
    ADMISSION,
    DEMONSTRATIONS,
    MARATHON_SFT,
    MARATHON,
    SPRINT,
    SOUP,
    SAO,
    EVALUATION,
    PROMOTION,
)
BASE = "base"
CANDIDATES = (BASE, MARATHON_SFT, MARATHON, SPRINT, SOUP, SAO)
"""Checkpoints that are evaluated side by side, in the order of the results table."""
