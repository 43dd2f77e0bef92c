"""Cases of `tests.multiprocess.worker`: the ordered transport, with calls that are matched only by number."""

import jax
import numpy as np
from jax.sharding import NamedSharding

from flax_mesh.errors import ShardingError
from flax_mesh.mpmd import Pipeline
from flax_mesh.mpmd.transport.ordered import OrderedTransport
from tests.multiprocess import cases
from tests.multiprocess.cases import end_at_once, error_of, put_and_get_all
from tests.multiprocess.counted import CountedMoves


def ordered(model: str, schedule: str, sizes: str, steps: str) -> None:
    """Trains with calls that are matched by number, then with the transfer server, and compares the results bit for
    bit. Then checks that changed values and mismatched numbers are detected."""
    pipeline = cases.make_pipeline(model, schedule, cases.parse_sizes(sizes))
    channel = pipeline.channel
    assert channel is not None and pipeline.ordered is None  # CPU clients do not support it

    def forced() -> Pipeline:
        kinds = {"mesh": pipeline.mesh, "schedule": pipeline.schedule, "rules": []}
        return Pipeline(pipeline.staged, pipeline.optimizer, **kinds, transport="ordered")

    print("forced:", error_of(forced), flush=True)
    moves = CountedMoves()

    def changed(array: jax.Array, target: NamedSharding) -> jax.Array:
        arrived = moves(array, target)
        return arrived + 1 if arrived.addressable_shards else arrived

    pipeline.ordered = OrderedTransport(channel, moves)
    ordered = cases.results(pipeline, model, int(steps))
    state = pipeline.init_state()
    before = moves.calls
    state, _ = pipeline.step(state, cases.batches(model, 1)[0])
    calls = moves.calls
    shards = (calls - before) // pipeline.groups[0].size
    assert set(put_and_get_all("calls", f"{calls}")) == {f"{calls}"}
    sent = sum(map(int, put_and_get_all("sent", f"{pipeline.num_transfers}")))
    assert shards > 0 and (shards == sent or len(pipeline.groups) != jax.process_count())
    pipeline.ordered = None
    keyed = cases.results(pipeline, model, int(steps))
    assert moves.calls == calls
    assert ordered[:2] == keyed[:2] and len(ordered[0]) == int(steps)
    assert ordered[2].keys() == keyed[2].keys()
    assert all(np.array_equal(x, keyed[2][name]) for name, x in ordered[2].items())
    print(f"{shards} transfers a step", flush=True)
    off_by_one = CountedMoves(10**6 + (jax.process_index() == jax.process_count() - 1))
    for move, limit_s in ((changed, 60), (off_by_one, 3)):
        pipeline.ordered = OrderedTransport(channel, move, limit_s)
        print("refused:", error_of(lambda: pipeline.step(state, cases.batches(model, 1)[0]), ShardingError), flush=True)
    end_at_once("ordered is done")
