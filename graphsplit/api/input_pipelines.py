"""Input of parallelized functions: the next batches are read, cut and sent ahead, or read by the host that uses them.

What enters: datasets, and the devices of a function. What leaves: batches that are where the next calls use them.

What this process reads travels to the workers inside of requests. So a pipeline that is given as a function is made on
each host. Every host reads every batch, and cuts out the rows of its own devices: rows never pass between hosts, and
batches are those of one pipeline, whatever it shuffles, draws, filters or leaves over. (To give each host some of the
files would read each row once; but then it would follow from the files which rows make a batch, and no batch would be
that of one device. One host that reads for all would send rows.) Each host having the whole of a batch, those that are
left go on with it when one is lost.

That is right if all hosts read the same. So every batch has a fingerprint on each host, and these are compared before
the batch is used: a pipeline that draws without seeds is an error, and not another law.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from graphsplit.core import structures
from graphsplit.core.devices import name_for_runtime, short_name, task_of
from graphsplit.core.hosts import by_host, host_device
from graphsplit.core.protos import function_definition
from graphsplit.core.structures import spec_text
from graphsplit.core.tensorflow_internals import RuntimeFunction
from graphsplit.errors import ArgumentError, UnsupportedError
from graphsplit.runtime.connected_workers import Call, connected_workers

Prepared = TypeVar("Prepared")
END: Any = object()


def ahead(items: Iterator[Any], prepare: Callable[[Any], Prepared], count: int) -> Iterator[Prepared]:
    """Yield `prepare(item)` for every item, in order, prepared up to `count` items ahead by another thread.

    What the iterator or `prepare` raises is raised here, after the items before it. When the consumer stops early, the
    other thread has finished with the iterator before it goes on; up to `count` items are lost.
    """

    def next_one() -> Any:
        item = next(items, END)
        return END if item is END else prepare(item)

    pending: collections.deque[Future[Any]] = collections.deque()
    executor = ThreadPoolExecutor(1, thread_name_prefix="graphsplit_prefetch")
    try:
        pending.extend(executor.submit(next_one) for _ in range(count))
        while (prepared := pending.popleft().result() if pending else next_one()) is not END:
            if count:
                pending.append(executor.submit(next_one))
            yield prepared
    finally:
        executor.shutdown(cancel_futures=True)


def results(function: Any, batches: Any, count: int) -> Iterator[Any]:
    """Return an iterator over what a `ParallelFunction` returns for every batch; see `ParallelFunction.map`."""
    if not is_dataset_function(batches):
        return _results(function, _alone(batches), count, ())
    hosts = tuple(by_host(function.devices))
    if not any(hosts):  # all devices are this process'
        return _results(function, _alone(batches()), count, ())
    return _results(function, _read(HostPipeline(function._name(), batches), hosts), count, hosts)


def _alone(batches: Iterable[Any]) -> Iterator[list[Any]]:
    """Return batches as one reader has them."""
    return map(lambda batch: [batch], batches)  # noqa: C417  (it begins at once to iterate, as a generator does not)


def _read(pipeline: HostPipeline, hosts: tuple[str, ...]) -> Iterator[list[Any]]:
    """Yield batches as all hosts have them."""
    for number in itertools.count():
        batches = pipeline.read(number, hosts)
        if not batches:
            return
        yield batches


def _results(function: Any, batches: Iterator[list[Any]], count: int, readers: tuple[str, ...]) -> Iterator[Any]:
    """Yield results for batches as each of the readers has them; without readers, as this process has them."""

    def prepare(batches: list[Any]) -> tuple[Any, Any, Any, Any]:
        tensors, tree = _flatten(function, batches)
        planned = function._find(tree)  # new signatures are traced by the user's own thread
        planned = planned if planned is None or readers else planned.on(tensors)
        sends = planned is not None and planned.sends(readers)
        return tensors, tree, planned, planned.send(tensors, readers) if sends else None

    for tensors, tree, sender, pieces in ahead(batches, prepare, count):
        # another one, if layouts changed meanwhile, or scopes are open here
        lying = None if readers else tensors
        yield function._run_planned(tree, lying, partial(_run, tensors, readers, sender, pieces))


class ReadCall:
    """A call on a batch that each host reads; on those hosts that have it, also again."""

    def __init__(self, pipeline: HostPipeline, number: int):
        self._pipeline = pipeline
        self._number = number
        self._found: dict[str, Any] = {}  # by host
        self._connection = connection()

    def __call__(self, function: Any) -> Any:
        """Return what a `ParallelFunction` returns; `END` if there is no such batch."""
        hosts = tuple(by_host(function.devices))
        if self._connection != connection():
            self._found, self._connection = {}, connection()
        if not self._found.keys() >= set(hosts):
            self._found.update(zip(hosts, self._pipeline.read(self._number, hosts), strict=False))
        if not self._found:
            return END
        tensors, tree = _flatten(function, [self._found[host] for host in hosts])
        return function._run_planned(tree, None, partial(_run, tensors, hosts, None, None))


def _run(tensors: Any, readers: tuple[str, ...], sender: Any, pieces: Any, planned: Any) -> list[tf.Tensor]:
    results: list[tf.Tensor] = planned.run_sent(tensors, pieces if planned is sender else None, readers)
    return results


def _flatten(function: Any, batches: list[Any]) -> tuple[list[tf.Tensor], structures.Container]:
    """Return the tensors of a batch, of one reader after the other, and its structure, which is that of each."""
    flat = [function._flatten(arguments_of(batch), {}) for batch in batches]
    return [tensor for tensors, _ in flat for tensor in tensors], flat[0][1]


def arguments_of(batch: Any) -> tuple[Any, ...]:
    """Return the arguments that a batch is: a tuple is several, and a named one is not, as in `Dataset.map`."""
    return batch if type(batch) is tuple else (batch,)


_serial = itertools.count()
_HERE = "map(dataset_fn()), with the parentheses, lets this process read, and send each device its rows."


def is_dataset_function(batches: object) -> bool:
    """Return whether what is given for batches is a function that returns them."""
    return callable(batches) and not isinstance(batches, Iterable)


def connection() -> int:
    """Return the number of the connection to workers: what is on them, but variables, ends with it."""
    workers = connected_workers()
    return 0 if workers is None else workers.connections


class _Element(NamedTuple):
    """What a host read.

    Attributes:
      value: the batch, which stays there.
      fingerprint: of its tensors' content; and what their types and shapes are.
    """

    value: Any
    fingerprint: bytes
    specs: tuple[str, ...]


class _HostReader:
    """An input pipeline on one host."""

    def __init__(self, name: str, host: str, number: int):
        self._name = name
        self._device = host_device(host)
        self.task = task_of(self._device)
        self._connection = connection()
        self._number = number
        self._last: _Element | None = None
        self._has_last = False
        self._next: Callable[[], tuple[Any, tf.Tensor]]

    def start(self, make: Callable[[], Any]) -> None:
        """Begin to read what `make` returns; it raises `ArgumentError` for what is no `tf.data.Dataset`."""
        with tf.device(name_for_runtime(self._device)):
            self._next = self._located(lambda: self._started(make))

    def __str__(self) -> str:
        return short_name(self._device).rpartition("/")[0] or "this process"

    def _started(self, make: Callable[[], Any]) -> Callable[[], tuple[Any, tf.Tensor]]:
        """Return what reads an element and takes its fingerprint: one call for both.

        Its operations name the device, and it is called from here: an eager operation on a worker that fails, or ends,
        may raise its error in what another thread does on that worker.
        """
        dataset = make()
        if not isinstance(dataset, tf.data.Dataset):
            raise ArgumentError(
                f"{self._name}.map(function): where devices are on workers, the function has to return a "
                f"tf.data.Dataset, which they can run; it returned {dataset!r}. {_HERE}"
            )
        iterator = iter(dataset.skip(self._number) if self._number else dataset)

        def read() -> tuple[Any, tf.Tensor]:
            element = iterator.get_next()
            parts = tf.nest.flatten(element, expand_composites=True)
            rows = [tf.raw_ops.Fingerprint(data=tf.reshape(part, [1, -1]), method="farmhash64") for part in parts]
            return element, tf.concat(rows, 0)

        return _all_on(name_for_runtime(self._device), tf.function(read, autograph=False).get_concrete_function())

    def can_read(self, number: int) -> bool:
        """Return whether a batch is the next one, or the last that was read, and the iterator is still there."""
        is_near = number == self._number or (self._has_last and number == self._number - 1)
        return is_near and self._connection == connection()

    def read(self, number: int) -> _Element | None:
        """Return a batch that `can_read` allows; None if there is none left."""
        if number == self._number:
            self._last = self._located(self._read_next)
            self._number, self._has_last = number + 1, True
        return self._last

    def _read_next(self) -> _Element | None:
        try:
            value, fingerprint = self._next()
        except tf.errors.OutOfRangeError:
            return None
        specs = [spec_text(part) for part in tf.nest.flatten(value, expand_composites=True)]
        return _Element(value, fingerprint.numpy().tobytes(), tuple(specs))

    def _located(self, run: Callable[[], Any]) -> Any:
        """Run something of the pipeline; what fails in TensorFlow's runtime says where, and at which batch."""
        try:
            return run()
        except tf.errors.OpError as error:
            if self.task is None or type(error) is tf.errors.OpError:
                raise
            message = (
                f"{self} could not read batch {self._number} of {self._name}.map: {error.message} (The pipeline runs "
                f"there, and needs its files there. {_HERE})"
            )
            raise type(error)(error.node_def, error.op, message) from error


def _all_on(device: str, concrete: Any) -> Callable[[], Any]:
    """Return a function without arguments, all on a device. (What a `tf.function` returns is where it is called.)"""
    graph = concrete.graph.as_graph_def()
    for node in graph.node:
        node.device = device
    inputs, outputs = [t.op.name for t in concrete.inputs], [t.name for t in concrete.outputs]
    effects = [operation.name for operation in concrete.graph.control_outputs]
    name = f"graphsplit_read_{next(_serial)}"
    definition = function_definition(name, graph.node, inputs, outputs, effects)
    specs, outs = (list(map(tf.TensorSpec.from_tensor, tensors)) for tensors in (concrete.inputs, concrete.outputs))
    function, captured = RuntimeFunction(definition, graph.library.function, specs, outs), concrete.captured_inputs
    packed = functools.partial(tf.nest.pack_sequence_as, concrete.structured_outputs, expand_composites=True)
    return lambda: packed(function(captured))


class HostPipeline:
    """An input pipeline that several hosts run, each for itself."""

    def __init__(self, name: str, make: Callable[[], Any]):
        self._name = name
        self._make = make
        self._readers: dict[str, _HostReader] = {}

    def read(self, number: int, hosts: Sequence[str]) -> list[Any]:
        """Return a batch as each of some hosts has it; nothing if there is none left.

        A host that has not read the batches before, because it was away or the connection is a new one, skips them.

        Raises:
          ArgumentError: if the pipeline is no `tf.data.Dataset`.
          UnsupportedError: if hosts read different batches.
          WorkerLostError: if a worker ends, or does not answer for the deadline.
        """
        elements = self._elements(number, hosts)
        prints = [element and element[1:] for element in elements]
        different_hosts = [
            host for host, print_of_host in zip(hosts, prints, strict=True) if print_of_host != prints[0]
        ]
        if different_hosts:
            names = ", ".join([str(self._readers[host]) for host in different_hosts])
            raise UnsupportedError(
                f"{self._name}.map: batch {number} of {names} is not that of {self._readers[hosts[0]]}. Each host runs "
                "the pipeline and takes its rows of each batch, so all must read the same data in the same order. Pass "
                "seed= to shuffle() and everything that draws random numbers (tf.random.set_seed is not enough: its "
                "seeds depend on what was made before), do not use deterministic=False, and use the same files "
                f"everywhere. Or {_HERE}"
            )
        return [element.value for element in elements if element is not None]

    def _elements(self, number: int, hosts: Sequence[str]) -> list[_Element | None]:
        """Let all hosts read at the same time; a worker that does not answer is an error."""

        def read() -> list[_Element | None]:
            readers = [self._reader(host, number) for host in hosts]  # one after the other: it is the user's code
            calls = [Call(functools.partial(reader.read, number)) for reader in readers]
            return [call.result() for call in calls]

        workers = connected_workers()
        if workers is None:
            return read()
        tasks = [task[1] for host in hosts if (task := task_of(host_device(host))) is not None]
        return workers.read(f"{self._name}.map", tuple(tasks), read)

    def _reader(self, host: str, number: int) -> _HostReader:
        reader = self._readers.get(host)
        if reader is None or not reader.can_read(number):
            reader = _HostReader(self._name, host, number)
            reader.start(self._make)
            self._readers[host] = reader
        return reader
