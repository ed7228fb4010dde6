"""Advantages, in numpy: HDPO's two decoupled group advantages, GAE over policy tokens, the cross-segment correction.

Pure functions over one group or one run. Batches, records and tensors stay outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

OUTSIDE = -1
"""Stratum of an episode that earns no efficiency credit."""


@dataclass(frozen=True)
class GroupAdvantages:
    """HDPO's advantages of the G episodes of one task. All arrays have shape [group]."""

    accuracy: Floats
    """A_acc, 0 for invalid episodes and for groups without spread."""
    efficiency: Floats
    """A_eff, 0 outside Q."""
    in_stratum: Bools
    """Membership in Q: valid, of an eligible stratum. Explicit, because A_eff is zero-centred inside Q."""


def strata_by_success(success: ArrayLike) -> NDArray[np.int64]:
    """HDPO's default strata: 0 for a correct episode (score at or above its pass threshold), OUTSIDE for the rest."""
    return np.where(np.asarray(success, bool), 0, OUTSIDE).astype(np.int64)


def strata_by_edges(rewards: ArrayLike, edges: Sequence[float]) -> NDArray[np.int64]:
    """Finer strata: episode i is in stratum j when edges[j] <= reward < edges[j+1]; OUTSIDE below edges[0].

    Raises ValueError when the edges are empty or do not increase.
    """
    if not edges or any(b <= a for a, b in pairwise(edges)):
        raise ValueError(f"strata edges {list(edges)} must be non-empty and increasing, such as [0.5, 1.0]")
    return np.searchsorted(np.asarray(edges, float), np.asarray(rewards, float), side="right").astype(np.int64) - 1


def hdpo_group(
    rewards: ArrayLike,
    costs: ArrayLike,
    strata: ArrayLike,
    valid: ArrayLike,
    *,
    preset: Literal["raw", "standardised"] = "raw",
    std_epsilon: float = 1e-6,
) -> GroupAdvantages:
    """HDPO (arXiv 2604.08545): accuracy and, conditioned on it, efficiency advantages of one task's group.

    rewards, costs (steps S), strata, valid: [group]. Invalid episodes leave before any statistic.
    A_acc = (r − mean) / (std + eps) over the valid episodes; R_eff = (S̄ − S) / S̄ inside a stratum of the valid ones.
    Standard deviations use ddof=1, as HDPO's code does. Raises ValueError on unequal shapes or a negative cost.
    """
    r, s = np.asarray(rewards, float), np.asarray(costs, float)
    q, ok = np.asarray(strata), np.asarray(valid, bool)
    if not r.shape == s.shape == q.shape == ok.shape or r.ndim != 1:
        raise ValueError(f"group arrays have shapes {r.shape}, {s.shape}, {q.shape}, {ok.shape}; give one value each")
    accuracy = np.zeros_like(r)
    accuracy[ok] = _standardise(r[ok], std_epsilon)
    efficiency = np.zeros_like(r)
    for stratum in np.unique(q[ok & (q != OUTSIDE)]):
        member = ok & (q == stratum)
        efficiency[member] = _efficiency(s[member], preset, std_epsilon)
    return GroupAdvantages(accuracy, efficiency, ok & (q != OUTSIDE))


def _standardise(x: Floats, epsilon: float) -> Floats:
    if x.size < 2 or x.min() == x.max():
        return np.zeros_like(x)
    return np.asarray((x - x.mean()) / (x.std(ddof=1) + epsilon), np.float64)


def _efficiency(costs: Floats, preset: str, epsilon: float) -> Floats:
    if costs.min() < 0:
        raise ValueError(f"cost {costs.min()} of a correct episode; steps cannot be negative")
    if costs.size < 2 or costs.min() == costs.max():
        return np.zeros_like(costs)
    relative: Floats = (costs.mean() - costs) / costs.mean()
    return relative if preset == "raw" else _standardise(relative, epsilon)


def terminal_rewards(reward: float, mask: ArrayLike) -> Floats:
    """[n] zeros with the episode's reward on the last policy token of a segment (CompactionRL).

    Raises ValueError when the segment has no policy token.
    """
    policy = np.flatnonzero(np.asarray(mask, bool))
    if policy.size == 0:
        raise ValueError("segment without a policy token; leave it out of the batch")
    out = np.zeros(np.asarray(mask).shape, np.float64)
    out[policy[-1]] = reward
    return out


def gae(rewards: ArrayLike, values: ArrayLike, mask: ArrayLike, *, gamma: float, lam: float) -> Floats:
    """Generalised advantages over the policy tokens of one segment; observations are no steps in time.

    rewards, values, mask: [n]. With policy tokens 0..k: delta_i = r_i + γ V_{i+1} − V_i, V past the end = 0,
    A_i = delta_i + γλ A_{i+1}. Returns [n], 0 where mask is False; values there are never read.
    Raises ValueError when a reward lies on a token that the policy did not sample.
    """
    r, v, m = np.asarray(rewards, float), np.asarray(values, float), np.asarray(mask, bool)
    lost = np.flatnonzero((r != 0) & ~m)
    if lost.size:
        raise ValueError(f"reward {r[lost[0]]} on masked token {lost[0]}; put it on the last policy token")
    out = np.zeros(r.shape, np.float64)
    ahead, next_value = 0.0, 0.0
    for i in np.flatnonzero(m)[::-1]:
        ahead = r[i] + gamma * next_value - v[i] + gamma * lam * ahead
        next_value = v[i]
        out[i] = ahead
    return out


def run_advantages(
    reward: float,
    values: Sequence[ArrayLike],
    masks: Sequence[ArrayLike],
    *,
    gamma: float,
    lam: float | Sequence[float],
) -> list[Floats]:
    """Advantages of all segments of one run, each ended by the episode's reward, corrected across segments.

    A_{s,i} = (γλ)^{N_{>s}} · A_loc[s,i] with N_{>s} the policy tokens of later segments (CompactionRL). With V=0 and
    one λ, every split of an episode gives the same advantages. `lam` may be one number per segment; the factor uses
    that of segment s. Returns one [n_s] array per segment.
    """
    lams = [lam] * len(masks) if isinstance(lam, int | float) else list(lam)
    counts = [int(np.asarray(m, bool).sum()) for m in masks]
    out = []
    for s, (value, mask) in enumerate(zip(values, masks, strict=True)):
        local = gae(terminal_rewards(reward, mask), value, mask, gamma=gamma, lam=lams[s])
        later = sum(counts[s + 1 :])
        out.append(np.asarray((gamma * lams[s]) ** later * local, np.float64))
    return out


def value_targets(reward: float, masks: Sequence[ArrayLike], *, gamma: float) -> list[Floats]:
    """Returns that the critic regresses on (λ_critic = 1): γ^(policy tokens still to come in the run) · reward.

    One [n_s] array per segment, 0 where mask is False.
    """
    zeros = [np.zeros(np.asarray(m).shape) for m in masks]
    return run_advantages(reward, zeros, masks, gamma=gamma, lam=1.0)


def adaptive_lambda(alpha: float, length: int) -> float:
    """VAPO's length-adaptive λ = 1 − 1/(α·l), not below 0; `length` l in policy tokens of the run (or segment).

    Raises ValueError when alpha or length is not positive.
    """
    if alpha <= 0 or length <= 0:
        raise ValueError(f"adaptive lambda of alpha {alpha} and length {length}; both must be positive")
    return max(0.0, 1.0 - 1.0 / (alpha * length))


def explained_variance(values: ArrayLike, targets: ArrayLike) -> float:
    """1 − Var(target − value) / Var(target) over [n]; 0 when the targets do not vary."""
    v, t = np.asarray(values, float), np.asarray(targets, float)
    spread = float(t.var()) if t.size else 0.0
    return 1.0 - float((t - v).var()) / spread if spread > 0 else 0.0


def normalised(advantages: Sequence[Floats], masks: Sequence[ArrayLike], epsilon: float = 1e-3) -> list[Floats]:
    """Centre and scale by mean and standard deviation (ddof=0) over all policy tokens of the batch; 0 elsewhere.

    Off by default in the recipe: SAO trains on plain advantages (our choice for small models).
    """
    flags = [np.asarray(m, bool) for m in masks]
    flat = np.concatenate([a[m] for a, m in zip(advantages, flags, strict=True)]) if flags else np.zeros(0)
    if flat.size == 0:
        return [np.zeros_like(a) for a in advantages]
    mean, std = flat.mean(), flat.std() + epsilon
    return [np.where(m, (a - mean) / std, 0.0) for a, m in zip(advantages, flags, strict=True)]
