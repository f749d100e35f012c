"""Data sets that are read from front to back and never counted: shards, lanes, blocks, and positions in them.

The order does not know the number of processes.  A stream has a number of lanes that follows from its shards alone; sample n
of a run is number n // lanes of lane n % lanes.  In each epoch the shards are shuffled and dealt out to the lanes; a lane
reads its shards one after another, in blocks of which each is shuffled.  A process opens the lanes that its slices of the
batches come from: with no more processes than lanes, and powers of two of both, each lane is read by one.

A position is where a block begins and how much of it was given, so that a run goes on with the very next sample, on any
number of processes.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from PIL import Image

from ds_flux import UserError
from ds_flux.config import DataConfig
from ds_flux.data.captions import Captions
from ds_flux.data.columns import KEY, TROUBLE, Columns, Row, columns_of, name_of_row
from ds_flux.data.schedule import SampleKey, Slices, turn_of
from ds_flux.data.tables import each_data_set, load_stream, name_of, root_of, undecoded
from ds_flux.randomness import epoch_order, key_seed, keyed_generator

MAX_LANES = 256  # each has a file open
MAX_EMPTY_EPOCHS = 10
READ_AHEAD = 2  # micro batches


class Start(NamedTuple):
    """A row of a data set, as a lane comes to it."""

    epoch: int
    turn: int
    """which of the lane's shards in this epoch"""
    row: int
    """in the shard"""


class Place(NamedTuple):
    """How far a lane has come in a data set."""

    block: Start
    """the first row of a block"""
    num_given: int
    """of the samples of that block"""


class Position(NamedTuple):
    """How far a lane has come."""

    num_given: int
    places: tuple[Place, ...]
    """in each data set"""


BEGINNING = Place(Start(0, 0, 0), 0)


@dataclass(frozen=True)
class StreamedRow:
    """One row that has been read; what `SampleDataset` asks of a source, for this row alone."""

    key: SampleKey
    title: str
    cells: Row
    columns: Columns
    lane: int = 0
    position: Position | None = None
    """of its lane, behind this row"""

    def images(self, _index: int) -> tuple[Image.Image, ...]:
        """The image.  Raises BadSample."""
        return (self.columns.image_of(self.cells),)

    def references(self, _index: int) -> tuple[Image.Image, ...]:
        """The references.  Raises BadSample."""
        return self.columns.references_of(self.cells)

    def caption(self, _index: int) -> Captions:
        """The caption, or several."""
        return self.columns.caption_of(self.cells)

    def name(self, _index: int) -> str:
        """How to find the row, for messages."""
        return self.title


@dataclass(frozen=True)
class ShardedRows:
    """One data set of a stream."""

    rows: Any  # datasets.IterableDataset
    columns: Columns
    number: int
    """among the data sets of the stream"""
    title: str

    @property
    def num_shards(self) -> int:
        """Files, or other parts that can be read by themselves."""
        return self.rows.num_shards

    def read(self, shard: int, first_row: int, epoch: int) -> Iterator[StreamedRow]:
        """The rows of a shard.  Where the rest of it cannot be read, one row says so."""
        rows = enumerate(self.rows.shard(num_shards=self.num_shards, index=shard).skip(first_row), first_row)
        last = first_row - 1
        try:
            for last, cells in rows:
                yield self.row_of(shard, last, epoch, cells)
        except Exception as error:  # noqa: BLE001  (each format's reader has errors of its own)
            reason = f"the rest of the shard cannot be read: {' '.join(str(error).split()) or type(error).__name__}"
            yield self.row_of(shard, last + 1, epoch, dict.fromkeys(self.columns.all_used) | {TROUBLE: reason})

    def row_of(self, shard: int, row: int, epoch: int, cells: Row) -> StreamedRow:
        """A row with its identity: its key where it has one, else its place."""
        name = name_of_row(cells) if cells.get(KEY) else None
        identity = key_seed("row", self.number, *([name] if name else [shard, row]))
        return StreamedRow((identity, epoch), name or f"row {row} of shard {shard} of {self.title}", cells, self.columns)


@dataclass(frozen=True)
class Stream:
    """One data set or several, mixed by weight."""

    parts: tuple[ShardedRows, ...]
    weights: tuple[float, ...]
    seed: int
    buffer: int
    """samples that are shuffled together, over all lanes"""

    @cached_property
    def num_lanes(self) -> int:
        """The largest power of two that leaves each lane a shard."""
        fewest = min([MAX_LANES, *(part.num_shards for part in self.parts)])
        return 1 << fewest.bit_length() - 1

    def rows(self, lane: int, position: Position | None) -> Iterator[StreamedRow]:
        """The endless sequence of a lane behind a position."""
        num_given, places = position or Position(0, (BEGINNING,) * len(self.parts))
        walks = [self.blocks(part, lane, place) for part, place in zip(self.parts, places, strict=True)]
        behind = list(places)
        for number in count(num_given):
            part = turn_of(number * self.num_lanes + lane, self.weights)
            behind[part], row = next(walks[part])
            yield replace(row, lane=lane, position=Position(number + 1, tuple(behind)))

    def blocks(self, part: ShardedRows, lane: int, place: Place) -> Iterator[tuple[Place, StreamedRow]]:
        """Rows block after block, each in an order of its own, with the place behind each.  A block ends with its epoch."""
        num_empty, full = 0, max(1, self.buffer // self.num_lanes)
        # the very first blocks differ in size: lest all lanes come to their next one at once
        size = max(1, full * (lane + 1) // self.num_lanes) if place.block == BEGINNING.block else full
        for epoch in count(place.block.epoch):
            first = place.block if epoch == place.block.epoch else Start(epoch, 0, 0)
            rows, num_empty = self.in_order(part, lane, first), num_empty + 1
            while block := list(islice(rows, size)):
                generator = keyed_generator("block", self.seed, part.number, lane, *block[0][0])
                for num_given, index in enumerate(torch.randperm(len(block), generator=generator).tolist(), start=1):
                    if block[0][0] != place.block or num_given > place.num_given:
                        yield Place(block[0][0], num_given), block[index][1]
                size, num_empty = full, 0
            if num_empty > MAX_EMPTY_EPOCHS:
                raise UserError(f"{part.title}: nothing to read in its shards")

    def in_order(self, part: ShardedRows, lane: int, first: Start) -> Iterator[tuple[Start, StreamedRow]]:
        """The rest of an epoch of the lane, as it is stored."""
        shards = epoch_order(self.seed, first.epoch, part.num_shards)[lane :: self.num_lanes].tolist()
        for turn in range(first.turn, len(shards)):
            first_row = first.row if turn == first.turn else 0
            for number, row in enumerate(part.read(shards[turn], first_row, first.epoch), first_row):
                yield Start(first.epoch, turn, number), row

    def once(self) -> Iterator[StreamedRow]:
        """Every row of all data sets, as it is stored."""
        for part in self.parts:
            for shard in range(part.num_shards):
                yield from part.read(shard, 0, 0)


@dataclass(frozen=True, kw_only=True)
class StreamSchedule(Slices):
    """The slices of one rank, of a stream.

    Args:
        positions: of each lane that was read from, in the run that goes on here.
    """

    stream: Stream
    positions: dict[int, Position] = field(default_factory=dict)

    def record(self, positions: Iterable[tuple[int, Position]]) -> dict[str, Any]:
        """For a checkpoint: how far each lane has come, from what all ranks say of those that they read."""
        furthest = dict(self.positions)
        for lane, position in positions:
            furthest[lane] = max(furthest.get(lane, position), position, key=lambda one: one.num_given)
        return {"num_shards": [part.num_shards for part in self.stream.parts], "lanes": furthest}

    def behind(self, record: dict[str, Any] | None) -> "StreamSchedule":
        """The schedule that goes on where a checkpoint was; of other shards with the next epoch; without a record anew."""
        if record is None:
            return self
        there = {
            int(lane): Position(num_given, tuple(Place(Start(*block), given) for block, given in places))
            for lane, (num_given, places) in record["lanes"].items()
        }
        if record["num_shards"] == [part.num_shards for part in self.stream.parts]:
            return replace(self, positions=there)
        num_given = sum(position.num_given for position in there.values())
        epoch = 1 + max((place.block.epoch for position in there.values() for place in position.places), default=-1)
        places, lanes = (Place(Start(epoch, 0, 0), 0),) * len(self.stream.parts), self.stream.num_lanes
        return replace(self, positions={lane: Position((num_given - lane - 1) // lanes + 1, places) for lane in range(lanes)})

    @property
    def described(self) -> str:
        """What it is a schedule of, in words."""
        return f"a stream of {sum(part.num_shards for part in self.stream.parts)} shards in {self.stream.num_lanes} lanes"

    def micro_batches(self, first_step: int, last_step: int) -> Iterator[list[StreamedRow]]:
        """This rank's micro batches of the optimizer steps first_step <= step < last_step, the first behind the positions."""
        return ahead(self.read(first_step, last_step), READ_AHEAD)

    def read(self, first_step: int, last_step: int) -> Iterator[list[StreamedRow]]:
        """The same, each when it is asked for."""
        lanes: dict[int, Iterator[StreamedRow]] = {}
        number = sum(position.num_given for position in self.positions.values())
        for _ in range(first_step, last_step):
            for _ in range(self.gradient_accumulation_steps):
                mine = range(number + self.dp_rank, number + self.micro_batch_size * self.dp_size, self.dp_size)
                yield [self.take(lanes, sample) for sample in mine]
                number += self.micro_batch_size * self.dp_size

    def take(self, lanes: dict[int, Iterator[StreamedRow]], number: int) -> StreamedRow:
        """The sample of this number; what its lane has before it is another rank's."""
        turn, lane = divmod(number, self.stream.num_lanes)
        if lane not in lanes:
            lanes[lane] = self.stream.rows(lane, self.positions.get(lane))
        return next(row for row in lanes[lane] if row.position is not None and row.position.num_given > turn)


def open_stream(config: DataConfig, seed: int, weights: tuple[float, ...]) -> Stream:
    """The data sets that the data flags name.  Raises UserError as `sources.open_source` does."""
    parts = []
    for number, one in enumerate(each_data_set(config)):
        rows = load_stream(one)
        columns = columns_of(one, rows.column_names, root_of(one), name_of(one))
        rows = undecoded(rows, [columns.image, *columns.references]).select_columns(columns.all_used)
        parts.append(ShardedRows(rows, columns, number, name_of(one)))
    return Stream(tuple(parts), weights or (1.0,) * len(parts), seed, config.shuffle_buffer)


def ahead(items: Iterator[Any], num: int) -> Iterator[Any]:
    """The items, the next `num` of them being made in a thread meanwhile."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        waiting = deque(thread.submit(next, items, end) for _ in range(num))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(thread.submit(next, items, end))
            yield item
