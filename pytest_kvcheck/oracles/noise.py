"""How far two log-probs of one token may lie apart on this launch: learned from its own controls.

No name of a data type or engine enters. A launch that shows deltas of 1e-5 on plain requests computes finely,
so a session that is off by 0.02 there is wrong; one that shows 0.04 on plain requests is allowed 0.12.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Below this, controls that agree prove nothing about precision: log_softmax itself rounds by about 5e-7, and
# half-precision engines are often bit-equal on the few shapes that a control has. Then the least delta that
# means anything is what batch shape alone was seen to do on real engines (0.047 to 0.06).
EXACT = 2e-6
UNKNOWN = 0.0625
# Fine arithmetic shows in most requests (2e-6 in float32). Where most are equal to the bit, one small delta is
# the lucky end of coarse noise: real vLLM in bfloat16 had 8e-5 once in 18 requests, then 0.026, then 0.05.
EQUAL = 5e-7
# Nothing above this is taken for noise, whatever a control shows.
CEILING = 0.25
# A few control tokens show less than the many of a workload: the greatest of thousands of draws lies about
# 1.5 to 2.5 times above the greatest of a hundred.
TIMES = 3.0
# One control request against the median of its like. Twelve tokens each: a factor of 2 is usual, 4 is seen.
OUTLIER_TIMES = 6.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Deltas (observed less reference, in nats) of one set of tokens; ``second`` is the second greatest.

    ``kl``: mean of ``exp(r) - 1 - r``.
    """

    count: int = 0
    greatest: float = 0.0
    second: float = 0.0
    p99: float = 0.0
    mean: float = 0.0
    kl: float = 0.0

    @classmethod
    def of(cls, deltas: Iterable[float]) -> Spread:
        values = list(deltas)
        if not values:
            return cls()
        sizes = sorted(abs(value) for value in values)
        # A delta beyond 50 says no more than one of 50, and exp() of it would overflow.
        ratios = (max(-50.0, min(50.0, -value)) for value in values)
        return cls(
            count=len(values),
            greatest=sizes[-1],
            second=sizes[-2] if len(sizes) > 1 else 0.0,
            p99=sizes[min(len(sizes) - 1, math.ceil(0.99 * len(sizes)) - 1)],
            mean=sum(sizes) / len(sizes),
            kl=sum(math.expm1(ratio) - ratio for ratio in ratios) / len(values),
        )

    def __str__(self) -> str:
        return f"max {self.greatest:.2g}, mean {self.mean:.2g}, KL {self.kl:.2g} over {self.count} tokens"


def allowance(seen: float, times: float = TIMES) -> float:
    """The greatest delta that noise of size ``seen`` explains, in nats.

    Fine arithmetic (1e-5) is given a wide margin (100 times, at least 0.005): a wrong slot moves a log-prob by
    far more. Coarse arithmetic (from 0.001) is given 0.1 or ``times`` what was seen.
    """
    if seen <= EXACT:
        return UNKNOWN
    return max(times * seen, min(100 * seen, 0.1), 0.005)


@dataclass(frozen=True, slots=True)
class Floor:
    """What this launch's controls showed. ``typical`` is the median over requests of their greatest delta."""

    spread: Spread = Spread()
    typical: float = 0.0
    requests: int = 0

    @property
    def known(self) -> bool:
        return self.requests > 0

    @property
    def limit(self) -> float:
        """Deltas above this are suspect. Without controls: 0.2, which no clean engine was seen to pass."""
        if not self.known:
            return 0.2
        least = UNKNOWN if self.typical <= EQUAL else 0.0
        return max(least, allowance(min(self.spread.greatest, CEILING)))

    def explains(self, spread: Spread) -> bool:
        """Whether noise explains these deltas of one request. The mean is judged from four tokens on.

        One token a little above the limit, with none beside it, is what the tail of coarse arithmetic looks
        like: a wrong slot moves most of the tokens behind it.
        """
        alone = spread.count > 1 and spread.greatest <= 2 * self.limit and spread.second <= self.limit / 2
        if spread.greatest > self.limit and not alone:
            return False
        return spread.count < 4 or spread.mean <= max(5 * self.spread.mean, self.limit / 3)

    def __str__(self) -> str:
        if not self.known:
            return "no control was run"
        return f"{self.spread} in {self.requests} plain requests"


def inliers(
    groups: Iterable[Sequence[Sequence[float]]], ceiling: float = CEILING
) -> tuple[list[Sequence[float]], float]:
    """The control requests that are noise, and the greatest median of a group.

    A group holds requests that ran alike (alone, or side by side), each as its deltas. A request far from the
    median of its group is no noise but a suspect of its own, so it must not widen the floor; nor may a group
    whose median passes ``ceiling``.
    """
    kept: list[Sequence[float]] = []
    typical = 0.0
    for group in groups:
        sizes = [max((abs(delta) for delta in deltas), default=0.0) for deltas in group]
        if not sizes:
            continue
        median = statistics.median_low(sizes)
        typical = max(typical, median)
        if median <= ceiling:
            bound = min(allowance(median, OUTLIER_TIMES), ceiling)
            kept += [deltas for deltas, size in zip(group, sizes, strict=True) if size <= bound]
    return kept, typical
