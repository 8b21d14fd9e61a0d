"""A step's rows from a stream, on all ranks or on none."""

from __future__ import annotations

from legato.data.dealing import BatchSource, StepBatches
from legato.errors import DataError, LegatoError
from legato.parallel.world import World


def fetch_together(source: BatchSource, step: int, *, world: World) -> StepBatches:
    """Collective: this rank's batches of ``step``; what goes wrong on one rank is an error on all.

    A host whose files differ would take other rows, then wait for ever for batches that the others
    don't have: so the ranks compare where the step leaves the stream.

    Args:
        source: Read while training.
        step: From 1.
        world: The ranks of the run.

    Returns:
        This rank's part of the step.

    Raises:
        DataError: The rows can't be read, or aren't the same on every rank.
        PeerLostError: That happened on another rank.
    """

    def fetch() -> StepBatches:
        try:
            return source.fetch(step)
        except LegatoError:
            raise
        except Exception as error:
            raise DataError(
                f"step {step}: its rows can't be read: {type(error).__name__}: {error}", step=step
            ) from error

    fetched, by_rank = world.on_every_rank_alike(
        fetch, fact=lambda made: [made.num_rows, made.epoch, made.data_place]
    )
    if by_rank:
        mine = by_rank[world.rank]
        rank, theirs = next((rank, each) for rank, each in enumerate(by_rank) if each != mine)
        raise DataError(
            f"step {step}: rank {rank} has other rows than rank {world.rank}: {theirs} and {mine} "
            "(rows, epoch, place in the stream). The data must be the same on every host.",
            step=step,
        )
    return fetched
