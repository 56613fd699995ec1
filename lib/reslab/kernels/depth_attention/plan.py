"""Which rows a pass over the layers reads when, and which reads share their rows.

Row 0 is the embedding, row i + 1 is written by sublayer i; read l is that of sublayer l, the last one the output's.
Costs are counted in rows, each as large as one activation: they say how much memory is read and written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

__all__ = ["Group", "Plan"]

MOST = 8
"""Reads, or rows, of one group."""

ALIGNED = 8
"""Scores of a row begin at multiples of so many columns."""


@dataclass(frozen=True)
class Group:
    """Neighbours that share what is `common` to them, and the rest of each. Alone, one has nothing in common."""

    members: tuple[int, ...]
    common: tuple[int, ...]
    own: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Plan:
    """Made by `Plan.of`; see there."""

    reads: tuple[tuple[int, ...], ...]
    joins: tuple[bool, ...]
    keep: bool
    sources: tuple[tuple[int, ...], ...]

    @staticmethod
    @lru_cache(maxsize=64)
    def of(
        reads: tuple[tuple[int, ...], ...],
        joins: tuple[bool, ...],
        keep: bool,
        sources: tuple[tuple[int, ...], ...] | None = None,
    ) -> "Plan":
        """For reads of the rows `reads[l]`, ascending; row i is added to row i - 1 where `joins[i]`.

        `keep` all rows, for a backward pass; else one goes once it is not among `sources[l]`, those that layers out of
        turn may ask for after row l; if not given, those of `reads[l]` and later ones.
        """
        if sources is None:
            later = [set(reads[read]).union(*reads[read:]) for read in range(len(reads))]
            sources = tuple(tuple(sorted(row for row in rows if row <= last)) for last, rows in enumerate(later))
        return Plan(reads, joins, keep, sources)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Of each row, the reads that it is part of."""
        found: list[list[int]] = [[] for _ in self.joins]
        for read, rows in enumerate(self.reads):
            for row in rows:
                found[row].append(read)
        return tuple(tuple(reads) for reads in found)

    @cached_property
    def spent(self) -> tuple[tuple[int, ...], ...]:
        """Of each row, the earlier ones that nobody asks for any more once it is written; none where all are kept."""
        if self.keep:
            return ((),) * len(self.sources)
        gone = (sorted({*before} - {*after}) for before, after in pairwise(self.sources))
        return ((), *(tuple(rows) for rows in gone))

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """Of each row, the first of the columns that its scores fill, one a reader; and how many there are in all."""
        ends = [0]
        for readers in self.readers:
            ends.append(ends[-1] + -(-len(readers) // ALIGNED) * ALIGNED)
        return tuple(ends)

    def column(self, row: int, read: int) -> int:
        return self.columns[row] + self.readers[row].index(read)

    @cached_property
    def mixing(self) -> tuple[Group, ...]:
        """Reads in groups, so that the least memory is moved: what they have in common is read once for all of them."""
        return _cheapest(
            range(len(self.reads)), lambda group: _common_rows([self.reads[read] for read in group]), self.reads
        )

    @cached_property
    def pulling(self) -> tuple[Group, ...]:
        """Rows in groups: gradients of the reads they have in common are gone through once for all of them."""
        shared = [row for row, readers in enumerate(self.readers) if len(readers) > 1]
        groups = _cheapest(shared, lambda group: _common_ends([self.readers[row] for row in group]), self.readers)
        alone = set(range(len(self.readers))) - set(shared)
        return (*groups, *(Group((row,), (), (self.readers[row],)) for row in sorted(alone)))

    @property
    def rows_mixed(self) -> int:
        """Rows read and written by all reads together: sources, partial sums and results."""
        return sum(map(_cost, self.mixing)) + len(self.reads)

    @property
    def rows_pulled(self) -> int:
        """Rows read and written by the backward pass: rows, gradients of reads, partial sums and results."""
        return sum(_cost(group) + len(group.members) * (2 if group.common else 1) for group in self.pulling) + sum(
            len(group.members) for group in self.pulling
        )


def _cost(group: Group) -> int:
    """Rows gone through: the common ones once, a partial sum written and read for each member, and the rest."""
    shared = len(group.common) + 2 * len(group.members) if group.common else 0
    return shared + sum(map(len, group.own))


def _common_rows(sets: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(set(sets[0]).intersection(*sets[1:])))


def _common_ends(sets: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """What all have in common, if it is the end of each."""
    common = _common_rows(sets)
    return common if common and all(each[-len(common) :] == common for each in sets) else ()


def _cheapest(
    members: Sequence[int],
    common: Callable[[Sequence[int]], tuple[int, ...]],
    needs: Sequence[tuple[int, ...]],
) -> tuple[Group, ...]:
    """The partition of `members` into runs that costs least."""
    best: list[tuple[int, tuple[Group, ...]]] = [(0, ())]
    for stop in range(1, len(members) + 1):
        choices = []
        for start in range(max(0, stop - MOST), stop):
            group = _group(tuple(members[start:stop]), common, needs)
            if group is not None:
                choices.append((best[start][0] + _cost(group), (*best[start][1], group)))
        best.append(min(choices, key=lambda choice: choice[0]))
    return best[-1][1]


def _group(
    members: tuple[int, ...],
    common: Callable[[Sequence[int]], tuple[int, ...]],
    needs: Sequence[tuple[int, ...]],
) -> Group | None:
    """None where several have nothing in common."""
    shared = common(members) if len(members) > 1 else ()
    if len(members) > 1 and not shared:
        return None
    own = tuple(tuple(each for each in needs[member] if each not in shared) for member in members)
    return Group(members, shared, own)
